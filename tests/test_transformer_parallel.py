"""What the guide's page on transformer_parallel derives, and what its pictures show."""

import importlib

import pytest
import torch
import torch.distributed as dist

from tests.helpers import ROOT
from transformer_parallel import check, results, tensor_parallel

DERIVED = {  # way: its program
    "each": "main", "zero1": "zero", "zero3": "zero", "tensor": "tensor_parallel", "gather": "ring_attention",
    "ring": "ring_attention", "replicas": "experts", "experts": "experts", "1f1b": "pipeline", "interleaved": "pipeline",
    "data_tensor": "mesh", "data_pipeline": "mesh", "dtensor": "tensor_parallel", "torch": "mesh", "moved": "mesh",
}


@pytest.mark.parametrize("program", sorted({*DERIVED.values(), "recompute"}))
def test_torchs_own_are_beside_what_is_written_out(program):
    module = importlib.import_module(f"transformer_parallel.{program}")
    ways, parsed = set(module.WAYS), lambda *flags: module.build_parser().parse_args(flags).ways
    for way, twin in module.TWINS.items():
        assert parsed("--ways", way, "--twin") == parsed("--ways", way, twin) == [way, twin]
        assert parsed("--ways", way, "--check") == [way]
    assert set(parsed()) == ways - {*module.TWINS.values()}
    assert set(parsed("--twin")) == set(parsed("--check")) == ways


def test_the_loss_of_large_logits(tmp_path):
    """Their exponentials overflow. This process is a world of its own."""
    torch.manual_seed(0)
    logits, targets = 1000 * torch.randn(2, 3, 8), torch.randint(8, (2, 3))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        loss = tensor_parallel.vocabulary_loss(logits, targets, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


@pytest.mark.parametrize("way", DERIVED)
@pytest.mark.parametrize("page", ["transformer.md", "transformer.ja.md"])
def test_the_guide_has_the_bytes_of_the_formulas(way, page):
    """In the section of the program, outside of what it has printed; `--check` holds what is counted against the same formulas."""
    program = DERIVED[way]
    args = importlib.import_module(f"transformer_parallel.{program}").build_parser().parse_args([])
    args.world_size = 4
    sizes = {name: parameter.shape for name, parameter in check.whole_model(args).named_parameters()}
    formula = {**check.FORMULAS, **(check.mixtures([]) if program == "experts" else {})}[way]
    sent = formula(args, 4, sizes)["bytes sent"]
    sent = (max(sent) if isinstance(sent, list) else sent) * 4 / check.FLOAT64 / results.MB
    section = (ROOT / "docs/lessons" / page).read_text().split(f"\n## {program}.py")[1].split("\n## ")[0]
    assert f"{sent:.2f} MB" in section.split("<!-- output")[0] + section.split("<!-- end -->")[-1]
