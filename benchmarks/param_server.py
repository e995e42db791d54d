"""How much slower is a network on a server than one in this process?

Steps of both in turns, on as many threads.

    python -m benchmarks.param_server --rounds 3
"""

import statistics
import time

import torch
from common import report
from common.cli import bounded, refuse
from common.data import load_data
from common.launcher import launch
from common.session import rpc_options
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.nn import functional as F

from param_server import main as lesson
from param_server.async_server import AsyncOptimizer, AsyncParameterServer, AsyncTrainerNet
from param_server.data import get_next_batch, require_inputs

WARM_UP = 10  # steps that are not counted


def run_worker(rank, world_size, args):
    """The trainer steps the server's network and one of its own, in turns; milliseconds of both."""
    if rank == 0:
        return lesson.run_parameter_server(rank, world_size, args, AsyncParameterServer)
    rpc.init_rpc(lesson.role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args))
    metrics = measure(args)
    rpc.shutdown()
    return metrics


def measure(args):
    """What `run_worker` returns."""
    train_set, _ = load_data(args)
    net, local = AsyncTrainerNet(args), lesson.Net()
    opt = AsyncOptimizer(lesson.SGD, net.get_global_param_rrefs(), lr=args.lr)
    local_opt = torch.optim.SGD(local.parameters(), lr=args.lr)
    net.train()
    milliseconds = {"server": [], "local": []}
    for epoch in range(args.rounds):
        for data, target in get_next_batch(train_set, 1, epoch, args):
            started = time.perf_counter()
            with dist_autograd.context() as cid:
                loss = F.nll_loss(net(data), target)
                dist_autograd.backward(cid, [loss])
                opt.step(cid)
            half_way = time.perf_counter()
            local_opt.zero_grad()
            F.nll_loss(local(data), target).backward()
            local_opt.step()
            milliseconds["server"].append(1000 * (half_way - started))
            milliseconds["local"].append(1000 * (time.perf_counter() - half_way))
    return {"ms_per_step": {name: statistics.median(values[WARM_UP:])
                            for name, values in milliseconds.items()}}


def build_parser():
    """The flags of param_server, whose steps are timed, and how long."""
    parser = lesson.build_parser("benchmark_param_server", __doc__)
    parser.set_defaults(world_size=2)
    parser.add_argument("--rounds", type=bounded(int, at_least=1), default=5, metavar="N",
                        help="epochs")
    return parser


def main(argv=None):
    """Print both times and write metrics.json."""
    args = build_parser().parse_args(argv)
    require_inputs(args, lesson.Net)
    if args.world_size != 2:
        refuse(f"--world_size {args.world_size} must be 2: a server and one trainer are timed")
    metrics = launch(run_worker, args, lesson.role_name)
    if metrics is None:
        return None
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    server, local = (metrics["ms_per_step"][name] for name in ("server", "local"))
    print(f"a step of {args.batch_size} images: {server:.1f} ms with the network on the server, "
          f"{local:.1f} ms in this process: {local / server:.2f} of its throughput")
    return metrics


if __name__ == "__main__":
    main()
