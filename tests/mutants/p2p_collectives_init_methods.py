"""Mistakes in `p2p_collectives/init_methods.py`."""

from tests.mutants import Mutant

MAIN, HANGS = "p2p_collectives/init_methods.py", ("--timeout", "10")
TCP = 'dist.init_process_group("gloo", init_method=init_method, rank={}, world_size={},\n' \
      "                            timeout=timedelta(seconds=args.timeout))\n" \
      '    return f"init_method={{init_method!r}}, rank={{rank}}, world_size={{size}}"\n\n\nMETHODS'
MUTANTS = [
    Mutant("ranks in another order", MAIN, TCP.format("rank", "size"), TCP.format("size - 1 - rank", "size"),
           check="tcp, group|error"),
    Mutant("RANK is not in the environment", MAIN, "        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))\n",
           "        os.environ.update(RANK=str(size - 1 - rank), WORLD_SIZE=str(size))\n", check="env, group|error"),
    Mutant("tcp is taken for env", MAIN, '"tcp": init_tcp', '"tcp": init_process', check="methods|error"),
    Mutant("file is tcp", MAIN, '    init_method = f"file://{file.absolute()}"\n',
           "    init_method = f\"tcp://{args.master_addr}:{args.master_ports['file']}\"\n", check="methods"),
    Mutant("the average for the sum", MAIN, "op=dist.ReduceOp.SUM", "op=dist.ReduceOp.AVG", check="group and sum"),
    Mutant("ranks count from zero", MAIN, "torch.tensor([rank + 1.0])", "torch.tensor([rank + 0.0])", check="group and sum"),
    Mutant("all_reduce forgotten", MAIN, "    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)\n", "", check="sum|error"),
    Mutant("the timeout is not that of the flag", MAIN, 'init_method="env://", timeout=timedelta(seconds=args.timeout)',
           'init_method="env://", timeout=timedelta(minutes=30)', check="env, group|error"),
    Mutant("a group is not left", MAIN, "        dist.destroy_process_group()\n", "", check="error|methods"),
]
