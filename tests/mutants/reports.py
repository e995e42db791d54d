"""Numbers, units, verdicts and pictures that say what was not so, of the whole repository: a test of each must fail.

Or `--check`, of a clock that counts what it should not.
"""

from tests.mutants import Mutant

TRANSFORMER = "transformer_parallel/results.py"
UPDATES, HYBRID = "param_server/batch_update_results.py", "ddp_rpc_hybrid/results.py"
RINGS, SHARED = "p2p_collectives/ring_allreduce_results.py", "p2p_collectives/shared_memory_results.py"
RNN = "rpc_rnn/main.py"
MODE = "        model.set_mode(training=True, seed=1_000_000 * args.seed + 1000 * epoch + 2)\n"
HIDDEN, BEGIN = "        hidden = model.init_hidden(args.batch_size)\n", "        history.begin_epoch()\n"
LAST = "test_a_wrong_last_number_is_not_timed"


def said(name, file, old, new, test):
    """Say something else; `test` of tests/test_reports.py must fail."""
    return Mutant(name, file, old, new, test=f"tests/test_reports.py::{test}")


MUTANTS = [
    # Units.
    said("MiB are called MB", TRANSFORMER, "MB = 1e6", "MB = 2**20", "test_transformer"),
    said("microseconds are called ms", TRANSFORMER, "1e3 * statistics", "1e6 * statistics", "test_transformer"),
    said("MiB of an update are called MB", UPDATES, "metrics['bytes_per_update'] / 1e6", "metrics['bytes_per_update'] / 2**20",
         "test_batched_updates"),
    said("GiB of all processes are called GB", UPDATES, "peak / 1e9", "peak / 2**30", "test_batched_updates"),
    said("KiB of a step are called kB", HYBRID, "metrics['bytes_per_step'] / 1000", "metrics['bytes_per_step'] / 1024",
         "test_hybrid_of_all_trainers"),
    said("milliseconds of a barrier are called us", SHARED, "1e6 * metrics['barrier_s']", "1e3 * metrics['barrier_s']",
         "test_shared_memory"),
    # One rank for all of them.
    said("the parameters of as many blocks as by default", TRANSFORMER, "Transformer(Shape(blocks=args.blocks))", "Transformer(Shape())",
         "test_transformer"),
    said("what rank 0 sends", TRANSFORMER, 'max(ranks, key=lambda rank: sum(rank["sent"].values()))', "ranks[0]",
         "test_transformer"),
    said("an update is as long as the first trainer's", UPDATES, 'max(of_trainer["seconds"] for of_trainer in update)',
         'update[0]["seconds"]', "test_batched_updates"),
    said("the first trainer's part of the table", "ddp_rpc_hybrid/sharded_table_results.py",
         "max(trainer[key] for trainer in trainers)", "trainers[0][key]", "test_sharded_table"),
    said("the loss of rank 0 for the mean", "ddp_basic/pitfalls.py",
         'sum(losses[step] for losses in metrics["losses"]) / args.world_size', 'metrics["losses"][0][step]', "test_pitfalls"),
    # First and last, above and below, one column and another.
    said("the first epoch's accuracy as the last", HYBRID, 'metrics["epochs"][0], metrics["epochs"][-1]',
         'metrics["epochs"][0], metrics["epochs"][0]', "test_hybrid_of_all_trainers"),
    said("accuracy and loss of a line swapped", "ddp_basic/elastic.py",
         "accuracy {metrics['test_accuracy']:.1%}, loss {metrics['loss']:.3f}",
         "accuracy {metrics['loss']:.1%}, loss {metrics['test_accuracy']:.3f}", "test_elastic"),
    said("how many times as slow as gloo", SHARED, 'medians["gloo"] / median', 'median / medians["gloo"]', "test_shared_memory"),
    said("how many times as slow as the naive ring", RINGS, "naive['median_s'] / ours['median_s']",
         "ours['median_s'] / naive['median_s']", "test_model_of_rings"),
    said("the time of a step in the column of waiting", TRANSFORMER, "row['waited_ms']:7.0f", "row['step_ms']:7.0f",
         "test_transformer"),
    said("blocks counted from one", "transformer_parallel/experts.py", '["figures"]["tokens"]):', '["figures"]["tokens"], 1):',
         "test_experts"),
    # Verdicts that look at the first of several.
    said("rank 0 holds what it should", "p2p_collectives/results.py", 'any(row[1] != row[2] for row in operation["rows"])',
         'any(row[1] != row[2] for row in operation["rows"][:1])', "test_operations"),
    said("the sum of rank 0 is right", "p2p_collectives/init_methods.py", "for value in values)", "for value in values[:1])",
         "test_meetings"),
    said("the first number of a sum is right", RINGS, "torch.equal(tensor, expected)", "torch.equal(tensor[:1], expected[:1])",
         LAST),
    said("the first slice is right", SHARED, "all(torch.equal(found, right) for found, right in pairs)",
         "torch.equal(*next(pairs))", LAST),
    said("the first parameter is the same on all ranks", "p2p_collectives/train_results.py",
         "for param in net.parameters()]", "for param in [*net.parameters()][:1]]",
         "test_replicas_drift_apart_in_their_last_parameter"),
    # Pictures that do not show the numbers of the table.
    said("waiting drawn as computing", "ddp_basic/skew_results.py", '(computing, "forward"), (waiting, "backward with all_reduce")',
         '(waiting, "forward"), (computing, "backward with all_reduce")', "test_skew"),
    said("transfer drawn over computing", UPDATES, "bottom=bottom, ", "", "test_batched_updates"),
    said("shares drawn as percents", HYBRID, "[100 * share for share in run]", "run", "test_hybrid_of_all_trainers"),
    said("each trainer has the staleness of all", "param_server/results.py", 'trainer["staleness"]["histogram"].items()',
         'metrics["staleness"]["histogram"].items()', "test_staleness"),
    said("speeds drawn as times", "model_parallel_resnet/results.py", '1 / row["speedup"] for', 'row["speedup"] for',
         "test_pipeline_picture"),
    # Clocks.
    Mutant("the evaluation is in the clock", "p2p_collectives/train_results.py", "        self.train_s += self.ended - self.began",
           "        accuracy(net, test_set, device)\n        self.train_s += time.perf_counter() - self.began",
           check="seconds", program="p2p_collectives/train.py"),
    Mutant("the validation is in the clock", "rpc_rnn/results.py", "self.ended - self.began", "time.perf_counter() - self.began",
           check="speed", program=RNN),
    Mutant("the clock begins before dropout is switched on", RNN, MODE + HIDDEN + BEGIN, BEGIN + MODE + HIDDEN, check="speed"),
]
