"""Each of several ranks updates its own parts of the parameters: together they are what one alone makes of them."""

import copy
import functools
import itertools
import math
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ls_train.optim import FusedAdam, peer_exchange
from ls_train.optim.all_reduce import FlatAllReduce

SHAPES = [(40, 16), (16,), (7, 16), (5,), (48, 16), (3,)]
UPDATES = 4
OPTIONS = {"lr": 1e-2, "weight_decay": 0.01}


def parameters(*dtypes):
    """Parameters of ``dtypes`` in turn; with several of them there is a frozen one too."""
    torch.manual_seed(1)
    kinds = zip(SHAPES, itertools.cycle(dtypes), strict=False)
    params = [torch.nn.Parameter((torch.rand(shape) * 0.5).to(dtype)) for shape, dtype in kinds]
    frozen = [torch.nn.Parameter(torch.rand(64, 16), requires_grad=False)] if len(dtypes) > 1 else []
    return [{"params": params[:3]}, {"params": [*params[3:], *frozen], "lr": 3e-2}]


def gradients(step, rank, params):
    """Powers of two, whose sums are exact in any order; an infinite one in the second update, of one rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    grads = [2.0 ** -torch.randint(0, 3, shape, generator=generator).to(torch.float32) for shape in SHAPES]
    if (step, rank) == (1, 1):
        grads[2][0, 0] = float("inf")
    return [grad.to(param.dtype) for grad, param in zip(grads, params, strict=True)]


def steps(optimizer, exchange, ranks, unused):
    """Do updates; return norms and flags."""
    found = []
    for step in range(UPDATES):
        params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
        for number, param in enumerate(params):
            shares = [gradients(step, rank, params)[number] for rank in ranks]
            param.grad = None if number in unused and step % 2 == 0 else sum(shares[1:], shares[0]).clone()
        measured = None
        if exchange is not None:
            exchange.start()
            # Either the sums are awaited together, or each part as it is measured.
            exchange.finish(exchange.end(), wait=step % 2 == 0)
            norm, found_inf = optimizer.grad_norm()
            both = torch.cat([norm * norm, found_inf])
            dist.all_reduce(both)
            measured = both[:1].sqrt(), both[1:]
        optimizer.expect(step, None)
        found.append(torch.cat(optimizer.measured_step(None, 1.0, measured)).clamp(max=1e9))
    return found


class MappedTensor:
    """A tensor of each rank in a file that all of them map, with flags for signals beside it."""

    made = 0

    def __init__(self, folder, rank, ranks, count, dtype):
        MappedTensor.made += 1
        paths = [f"{folder}/tensor{MappedTensor.made}.{other}" for other in range(ranks)]
        self.rank = rank
        self.copies = [torch.from_file(path, shared=True, size=count, dtype=dtype) for path in paths]
        shape = ranks, ranks, 16
        flags = torch.from_file(
            f"{folder}/flags{MappedTensor.made}", shared=True, size=math.prod(shape), dtype=torch.int32
        )
        self.flags = flags.view(shape).numpy()

    def signal(self, rank, channel):
        time.sleep(2e-3 * (self.rank + channel) % 5e-3)  # no rank is always first
        self.turn(self.rank, rank, channel, 0)

    def wait(self, rank, channel):
        self.turn(rank, self.rank, channel, 1)

    def turn(self, source, target, channel, value):
        """Change a flag once it is ``value``."""
        end = time.monotonic() + 60
        while self.flags[source, target, channel] != value:
            assert time.monotonic() < end, f"no signal from rank {source} on channel {channel}"
            time.sleep(1e-4)
        self.flags[source, target, channel] = 1 - value


def run_rank(rank, ranks, folder, dtypes, compact, unused, connected):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    optimizer = FusedAdam(parameters(*dtypes), **OPTIONS, compact_master=compact)
    # A group for the gathers, which pass those of the sums by, and one for everything.
    gathers = dist.new_group() if ranks == 2 else None
    exchange = FlatAllReduce(optimizer.buffers, pieces=3, sharded=True, gather_group=gathers)
    assert exchange.is_sharded
    if connected:
        exchange.connect(functools.partial(MappedTensor, folder, rank, ranks))
    optimizer.share(exchange)
    found = steps(optimizer, exchange, [rank], unused)
    params = [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]
    for read in (optimizer.state_dict, lambda: copy.deepcopy(optimizer)):
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            read()
    for update in (optimizer.measured_step, lambda: optimizer.step(max_norm=1.0)):
        with pytest.raises(RuntimeError, match="pass norm and flag of all ranks"):
            update()
    refuses_other_parameters(optimizer)
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()
    optimizer.load_state_dict(copy.deepcopy(state))
    again = optimizer.state_dict()
    torch.save((found, params, state, again), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def refuses_other_parameters(optimizer):
    """Added or moved ones raise, and leave the optimiser as it was."""
    buffers, param = optimizer.buffers, optimizer.param_groups[0]["params"][0]
    groups, window = len(optimizer.param_groups), param.data
    with pytest.raises(RuntimeError, match="after the ranks had divided them"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    param.data = window.clone()
    with pytest.raises(RuntimeError, match="after the ranks had divided them"):
        optimizer.grad_norm()
    param.data = window
    assert len(optimizer.param_groups) == groups
    assert optimizer.buffers == buffers


def assert_same(first, second, exactly=True):
    assert first.keys() == second.keys()
    for key, entry in first.items():
        for name, value in entry.items():
            other = second[key][name]
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, other, rtol=0 if exactly else 1e-5, atol=0 if exactly else 1e-6)
            else:
                assert value == other


@pytest.mark.parametrize("connected", [False, True], ids=["process group", "peers"])
@pytest.mark.parametrize(
    ("ranks", "dtypes", "compact", "unused"),
    [
        (2, [torch.float32], False, []),
        (2, [torch.float16], False, [4]),
        (2, [torch.bfloat16], True, [0]),
        (3, [torch.float32], False, [1]),
        (4, [torch.float16, torch.float32], True, [0, 2, 4]),
    ],
    ids=["float32", "float16", "compact", "three ranks", "two dtypes, one comes late"],
)
def test_ranks_together_equal_one(tmp_path, ranks, dtypes, compact, unused, connected):
    """Parameters, state and norms, with an overflow of one rank, parameters without gradient, and a clipped norm."""
    # Forks: an import of torch takes longer than the rest, and nothing here uses a GPU.
    mp.start_processes(
        run_rank, (ranks, tmp_path, dtypes, compact, unused, connected), nprocs=ranks, start_method="fork"
    )
    results = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]
    optimizer = FusedAdam(parameters(*dtypes), **OPTIONS, compact_master=compact)
    found = steps(optimizer, None, range(ranks), unused)
    params = [param.detach() for group in optimizer.param_groups for param in group["params"]]
    for norms, values, state, again in results:
        torch.testing.assert_close(torch.stack(norms), torch.stack(found), rtol=1e-6, atol=0)
        for value, first, one in zip(values, results[0][1], params, strict=True):
            assert torch.equal(value, first), "all ranks hold the same bits"
            torch.testing.assert_close(value, one)
        assert_same(state["state"], results[0][2]["state"])
        assert_same(state["state"], again["state"])
        assert_same(state["state"], optimizer.state_dict()["state"], exactly=False)


def test_parts_are_aligned_and_cover_every_piece(monkeypatch):
    """Each rank's parts begin at multiples of 16 bytes, and all of them together are the buffer."""
    optimizer = FusedAdam(parameters(torch.float16), **OPTIONS)
    (buffer,) = optimizer.buffers
    monkeypatch.setattr(dist, "get_world_size", lambda group: 5)
    assert not FlatAllReduce(optimizer.buffers, sharded=True).is_sharded, "1152 elements cannot be divided by 5 and 8"
    for ranks in (2, 4, 8):
        monkeypatch.setattr(dist, "get_world_size", lambda group, ranks=ranks: ranks)
        covered = torch.zeros(buffer.begins[-1], dtype=torch.int64)
        for rank in range(ranks):
            monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
            exchange = FlatAllReduce(optimizer.buffers, pieces=3, sharded=True)
            assert exchange.is_sharded
            for part in exchange.parts(buffer):
                assert part.start % 8 == part.stop % 8 == 0
                covered[part] += 1
        assert covered.unique().tolist() == [1]


def test_only_shared_state_can_be_consolidated():
    """fairseq asks with hasattr whether the optimiser gathers its state, or the wrapper around the model has to."""
    assert not hasattr(FusedAdam(parameters(torch.float32)), "consolidate_state_dict")


class LateDevice:
    """Symmetric memory of a busy device, which zeroes flags when its turn comes, and of a rank that signals at once."""

    def __init__(self):
        self.flag, self.work = torch.zeros(1), []

    def empty(self, count, *, dtype, device):
        self.work.append(self.flag.zero_)
        return torch.empty(count, dtype=dtype)

    def rendezvous(self, tensor, group_name):
        self.flag.fill_(1)
        return self

    def get_buffer(self, rank, sizes, dtype):
        return torch.empty(sizes, dtype=dtype)

    def synchronize(self):
        while self.work:
            self.work.pop()()

    def wait_signal(self, rank, channel, limit):
        self.synchronize()
        assert self.flag == 1, "waits for ever"


def test_no_signal_is_lost_while_flags_are_zeroed(monkeypatch):
    device = LateDevice()
    monkeypatch.setattr(peer_exchange, "_symmetric_memory", lambda: device)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    peer_exchange.SymmetricTensor(8, torch.int32, SimpleNamespace(group_name="ranks")).wait(1, 0)


def find_obstacle(rank, ranks, folder, broken, hosts):
    """Look for an obstacle on a rank whose GPU, driver or torch is replaced as ``broken`` says; write the answer."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    group = dist.new_group()
    peer_exchange.dist.get_backend = lambda group: "nccl"
    peer_exchange.socket.gethostname = lambda: hosts[rank]
    torch.cuda.current_device = lambda: 0 if broken == "device" else rank
    torch.cuda.device_count = lambda: ranks
    torch.cuda.can_device_access_peer = lambda device, peer: True
    is_broken = rank == 1
    peer_exchange._has_native_atomics = lambda device, peer: not (is_broken and broken == "atomics")

    def allocate(count, dtype):
        if is_broken and broken == "allocation":
            raise RuntimeError("CUDA driver error: operation not supported\nmore")
        return torch.empty(count, dtype=dtype)

    class Trial(MappedTensor):
        def __init__(self, count, dtype, group):
            if broken == "rendezvous":
                raise RuntimeError("pidfd_getfd: Operation not permitted")
            super().__init__(folder, rank, ranks, count, dtype)

        def wait(self, rank, channel):
            super().wait(rank, channel)
            if is_broken and broken == "values":
                self.copies[rank] = torch.zeros_like(self.copies[rank]) - 1

    peer_exchange._symmetric, peer_exchange.SymmetricTensor = allocate, Trial
    torch.save(peer_exchange.peer_obstacle(group), f"{folder}/obstacle{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("broken", "hosts", "expected"),
    [
        (None, "aa", None),
        (None, "ab", "several hosts"),
        ("device", "aa", "does not see the GPUs of the others"),
        ("atomics", "aa", "GPU 1 has no atomic access to the memory of GPU 0"),
        ("allocation", "aa", "does not work here: CUDA driver error: operation not supported"),
        ("rendezvous", "aa", "Operation not permitted"),
        ("values", "aa", "GPU 1 reads wrong values"),
    ],
)
def test_all_ranks_find_the_same_obstacle(tmp_path, broken, hosts, expected):
    """Also where one rank alone meets it: ranks that exchange in different ways would wait for each other for ever."""
    mp.start_processes(find_obstacle, (2, tmp_path, broken, hosts), nprocs=2, start_method="fork")
    first, second = (torch.load(tmp_path / f"obstacle{rank}.pt") for rank in range(2))
    assert first == second
    assert first is None if expected is None else first is not None and expected in first
