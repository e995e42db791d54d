"""Refusals, time-outs and blame left out, of the whole repository: a test of each must fail."""

from tests.mutants import Mutant

FLAGS = "tests/test_flags.py"
BLAME = "tests/test_launch.py::test_the_cause_comes_before_silence_before_notices"
CHECKPOINT, LIMITS, LAUNCH = "common/checkpoint.py", "common/limits.py", "common/launch.py"


def accepted(name, file, condition, test=f"{FLAGS}::test_bad_input"):
    """Accept what `condition`, of an `if` that refuses, is true of."""
    return Mutant(name, file, f"if {condition}", "if False", test=test)


MUTANTS = [
    # What this machine cannot hold, or cannot write.
    accepted("more bytes than the memory has", LIMITS, "n_bytes > memory_bytes()", f"{FLAGS}::test_more_than_the_memory"),
    accepted("more processes than the memory holds", LIMITS, "number > most", f"{FLAGS}::test_known_bad_input"),
    accepted("whatever is no file, and a name of no file", LIMITS, "not stat.S_ISREG(path.stat().st_mode)",
             f"{FLAGS}::test_known_bad_input"),
    accepted("a name that leaves no room for the temporary one", LIMITS, "0 < longest < len(os.fsencode(path.name))",
             f"{FLAGS}::test_known_bad_input"),
    Mutant("a copy of the model on each rank is not counted", "transformer_parallel/zero.py", "copies=1 if sharded else args.world_size",
           "copies=1", test=f"{FLAGS}::test_more_than_the_memory"),
    Mutant("open files do not limit the processes", LIMITS, "min(files, memory)", "memory",
           test=f"{FLAGS}::test_open_files_limit_the_processes"),
    # Flags that do not go together.
    accepted("a threshold out of reach", "rpc_rl/results.py", "args.reward_threshold >= min(share, limit) and not args.check"),
    Mutant("a threshold just out of reach", "rpc_rl/results.py", "args.reward_threshold >= min(share", "args.reward_threshold > min(share",
           test=f"{FLAGS}::test_bad_input"),
    Mutant("an episode as long as the threshold", "batch_rl/until_solved.py", "args.num_steps <= args.reward_threshold",
           "args.num_steps < args.reward_threshold", test=f"{FLAGS}::test_bad_input"),
    accepted("a batch that does not divide", "transformer_parallel/main.py",
             "args.batch_size % (args.world_size * args.accumulate)"),
    Mutant("torch's own way with rows that do not divide", "transformer_parallel/tensor_parallel.py",
           'way in ("sequence", "dtensor_sequence")', 'way == "sequence"', test=f"{FLAGS}::test_bad_input"),
    accepted("more trainers than images", "param_server/data.py",
             "starts_rank(args, 1) and args.world_size - 1 > (n_samples := len(load_data(args)[0]))"),
    Mutant("as many trainers as images are refused", "param_server/data.py", "args.world_size - 1 > (", "args.world_size - 1 >= (",
           test=f"{FLAGS}::test_bad_input"),
    accepted("a server and two trainers in a program for one", "rpc_rnn/main.py", "args.world_size != 2"),
    accepted("an old store for a new run", "p2p_collectives/init_methods.py", "args.file.exists() and not manual"),
    accepted("micro-batches of several shapes", "model_parallel_resnet/schedules.py", "args.batch_size % num_split"),
    # Checkpoints that are not those of this training.
    accepted("flags of another training", CHECKPOINT, "name in args.settings and args.settings[name] != value",
             f"{FLAGS}::test_a_training_goes_on_with_its_flags"),
    Mutant("another size of a batch", "common/cli.py", 'MAY_CHANGE = {"checkpoint"', 'MAY_CHANGE = {"batch_size", "checkpoint"',
           test=f"{FLAGS}::test_a_training_goes_on_with_its_flags"),
    accepted("fewer epochs than there were", CHECKPOINT, "args.epochs < behind", f"{FLAGS}::test_not_its_checkpoint"),
    accepted("weights of another model", CHECKPOINT,
             'state and _shapes(state[weights]) != _shapes(make_model().state_dict())',
             f"{FLAGS}::test_not_its_checkpoint"),
    Mutant("weights of other sizes", CHECKPOINT, 'getattr(tensor, "shape", None)', 'getattr(tensor, "ndim", None)',
           test=f"{FLAGS}::test_not_its_checkpoint"),
    accepted("weights that are no numbers", CHECKPOINT, "not _finite(state)", f"{FLAGS}::test_not_its_checkpoint"),
    Mutant("a checkpoint of another example", CHECKPOINT, 'state["example"] != args.example', "False",
           test=f"{FLAGS}::test_not_its_checkpoint"),
    Mutant("a counter that counts nothing", CHECKPOINT, "type(value) is int and value >= 0", "isinstance(value, int)",
           test=f"{FLAGS}::test_half_a_checkpoint"),
    Mutant("a part that is missing", CHECKPOINT, "name in value and _fits(value[name], part)", "name not in value or _fits(value[name], part)",
           test=f"{FLAGS}::test_half_a_checkpoint"),
    Mutant("an optimizer that is missing", CHECKPOINT, "len(value) == len(needs)", "True", test=f"{FLAGS}::test_not_its_checkpoint"),
    Mutant("a generator's state of any length", CHECKPOINT, "(value.dtype, value.shape) == (needs.dtype, needs.shape)", "True",
           test=f"{FLAGS}::test_not_its_checkpoint"),
    Mutant("a file that is not resumed is not looked at, and lost", CHECKPOINT,
           "load(args, needs) if args.resume or args.checkpoint.exists() else None",
           "load(args, needs) if args.resume else None", test=f"{FLAGS}::test_not_its_checkpoint"),
    Mutant("half a file has the name of a whole one", "common/report.py",
           'path.with_name(f".{path.name}.{os.getpid()}.tmp")', "path",
           test="tests/test_checkpoints.py::test_half_a_file_is_removed"),
    # A training that goes on with what is no number.
    accepted("an infinite loss", "common/report.py", "not math.isfinite(loss)", "tests/test_reports.py::test_a_training_that_diverges"),
    # Who is to blame, and when.
    Mutant("a rank that is silent is never blamed", LAUNCH, "        if age > SILENT_S:\n", "        if False:\n",
           test=BLAME),
    Mutant("a rank that has noticed an end is blamed at once", LAUNCH, "if now - self.since < GRACE_S:", "if False:", test=BLAME),
    Mutant("a connection that is lost is a failure of its own", LAUNCH, "return Failure(LOST, rank,", "return Failure(CAUSE, rank,",
           test="tests/test_launch.py::test_what_an_exception_means"),
    Mutant("an error that came over RPC is the caller's", LAUNCH, "    if origins:", "    if False:",
           test="tests/test_launch.py::test_what_an_exception_means"),
    Mutant("status 0 is a good end", LAUNCH, "if not states.is_over(rank):", "if processes[rank].exitcode and not states.is_over(rank):",
           test="tests/test_launch.py::test_local[rpc_rl.main-exit0-1]"),
    Mutant("a script of another checkout is accepted", "common/program.py", "if file.parents[1] != ROOT:", "if False:",
           test="tests/test_launch.py::test_what_is_judged_is_the_file_that_was_given"),
]
