"""What `--check` of transformer_parallel cannot see, and the bytes that the guide derives."""

import importlib
import re

import pytest
import torch
import torch.distributed as dist

from tests.helpers import ROOT
from transformer_parallel import check, experts, results, tensor_parallel, zero

DERIVED = {  # variant: its program
    "each": "main", "zero1": "zero", "zero3": "zero", "tensor": "tensor_parallel", "gather": "ring_attention",
    "ring": "ring_attention", "replicas": "experts", "experts": "experts", "1f1b": "pipeline", "interleaved": "pipeline",
    "data_tensor": "mesh", "data_pipeline": "mesh",
}


@pytest.fixture
def group(tmp_path):
    """Make this process a world of its own."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("program", sorted({*DERIVED.values(), "recompute"}))
def test_the_built_in_versions_follow_the_written_out_variants(program):
    module = importlib.import_module(f"transformer_parallel.{program}")
    ways, parsed = set(module.WAYS), lambda *flags: module.build_parser().parse_args(flags).ways
    for way, builtin in module.BUILTIN.items():
        assert parsed("--ways", way, "--builtin") == parsed("--ways", way, builtin) == [way, builtin]
        assert parsed("--ways", way, "--check") == [way]
    assert set(parsed()) == ways - {*module.BUILTIN.values()}
    assert set(parsed("--builtin")) == set(parsed("--check")) == ways


def test_the_loss_of_large_logits(group):
    """Their exponentials overflow."""
    torch.manual_seed(0)
    logits, targets = 1000 * torch.randn(2, 3, 8), torch.randint(8, (2, 3))
    loss = tensor_parallel.vocabulary_loss(logits, targets, dist.group.WORLD)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


@pytest.mark.parametrize("way", ["zero1", "zero2"])  # zero3 is zero2 in this
def test_a_parameter_without_a_gradient(way, group):
    """A unit could not be updated: the run ends in words."""
    args = zero.build_parser().parse_args(["--blocks", "1"])
    model = zero.Transformer(args.shape)
    model.blocks[0].unused = torch.nn.Linear(2, 2)
    variant = zero.WAYS[way](model, args)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    variant.forward_backward(tokens, tokens)
    with pytest.raises(RuntimeError, match="2 parameters got no gradient"):
        variant.finish_gradients()


@pytest.mark.parametrize("way", DERIVED)
def test_the_guide_has_the_bytes_of_the_formulas(way):
    """On the program's page, without its output; `--check` compares the same formulas with what is counted."""
    program = importlib.import_module(f"transformer_parallel.{DERIVED[way]}")
    args = program.build_parser().parse_args([])
    args.world_size = 4
    weights = dict(check.full_model(args).named_parameters())
    sent = program.COSTS[way](args, 4, weights, *([[]] if program is experts else []))["bytes sent"]
    sent = (max(sent) if isinstance(sent, list) else sent) / results.MB
    page = {"main": "data", "tensor_parallel": "tensor", "ring_attention": "ring"}.get(DERIVED[way], DERIVED[way])
    for language in ("md", "ja.md"):
        text = (ROOT / f"docs/lessons/transformer_{page}.{language}").read_text(encoding="utf-8")
        assert f"{sent:.2f} MB" in re.sub("<!-- output.*?<!-- end -->", "", text, flags=re.DOTALL)
