"""What the workbook says, in Japanese and in English: `say("passed", "ja", findings=12)`."""

import tomllib
from pathlib import Path

WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text())


def say(key: str, language: str, **values: object) -> str:
    """Return the words of a key.

    Args:
        key: one of words.toml.
        language: "ja" or "en".
        values: what its braces stand for; a dict has it in both languages.
    """
    said = {name: value[language] if isinstance(value, dict) else value
            for name, value in values.items()}
    return WORDS[key][language].format(**said)
