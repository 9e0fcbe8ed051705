"""Two GPUs, a process each: the one-shot all-reduce against a sum in float64, and blocks that one reads in the memory of the other."""

import math
import multiprocessing
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from minivllm_kernels.cuda import ops
from minivllm_kernels.cuda.all_reduce import open_memory, share_memory

REASON = ops.peers_unsupported(2) if torch.cuda.device_count() > 1 else "torch sees no two GPUs"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
MOST = 1 << 20
SHAPES = ((1, 8), (1, 4096), (3, 4096), (16, 4096), (1, 8), (64, 4096), (57, 1032), (128, 4096))
EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-23}


def numbers(rank: int, i: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * i + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def connect(rank: int, folder: str) -> ops.PeerAllReduce:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )

    def exchange(handle: bytes) -> list[bytes]:
        handles = [None, None]
        dist.all_gather_object(handles, handle)
        return handles

    return ops.PeerAllReduce(rank, 2, exchange, MOST)


def sums(reduce: ops.PeerAllReduce, rank: int) -> list[torch.Tensor]:
    """Of every dtype and shape, one after the other, with ranks that come at different times."""
    found = []
    for i, shape in enumerate(SHAPES):
        for dtype in EPSILON:
            x = numbers(rank, i, shape, dtype).cuda()
            if not reduce.takes(x):
                continue
            if i % 2 == rank:
                time.sleep(0.01)
            reduce(x)
            found.append(x.cpu())
    return found


def replays(reduce: ops.PeerAllReduce, rank: int) -> list[torch.Tensor]:
    """A graph of many sums, each of the one before: a sum that is read too early, or written too late, spreads."""
    start = numbers(rank, 7, (16, 4096), torch.float32).cuda()
    x = torch.empty_like(start)
    reduce(x)  # compiles the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(start)
        for _ in range(40):
            reduce(x)
            x.mul_(0.25 + 0.5 * rank)  # the ranks differ again
    found = []
    for _ in range(20):
        graph.replay()
        found.append(x.cpu())
    return found


def blocks(rank: int) -> list[torch.Tensor]:
    """What the second rank copies out of the middle of the first one's memory: blocks 4 and 1, to places 2 and 0."""
    shape = (2, 6, 16, 2, 64)
    data = numbers(rank, 9, (1, 2 * math.prod(shape)), torch.float16).cuda().view(2, *shape)
    shared: list = [None, None]
    dist.all_gather_object(shared, share_memory(data[1].data_ptr()))
    target = torch.zeros((2, 3, 16, 2, 64), dtype=torch.float16, device="cuda")
    if rank == 1:
        ops.copy_peer_blocks(open_memory(shared[0]), 6, target, torch.tensor([[4, 2], [1, 0]], device="cuda"))
    found = target.cpu()
    dist.barrier()  # the memory is there until it has been read
    return [found]


def rank_process(rank: int, folder: str, results) -> None:
    try:
        reduce = connect(rank, folder)
        with pytest.raises(ValueError, match="x must be contiguous"):
            reduce(torch.zeros(3, device="cuda"))
        found = sums(reduce, rank), replays(reduce, rank), blocks(rank)
        results.put(
            (
                rank,
                [
                    [
                        x.numpy().tobytes() if x.dtype == torch.float32 else x.view(torch.int16).numpy().tobytes()
                        for x in part
                    ]
                    for part in found
                ],
            )
        )
    except BaseException as error:  # noqa: BLE001 - the test says it
        results.put((rank, repr(error)))
    results.close()
    results.join_thread()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found: bytes."""
    context, folder = multiprocessing.get_context("spawn"), str(tmp_path_factory.mktemp("ranks"))
    results = context.Queue()
    processes = [context.Process(target=rank_process, args=(rank, folder, results), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(30)
    assert not any(isinstance(x, str) for x in found.values()), found
    return found


def test_sums_are_right_and_equal_on_both(found):
    assert found[0][0] == found[1][0]
    wanted = [
        (sum(numbers(rank, i, shape, dtype).double() for rank in range(2)), dtype)
        for i, shape in enumerate(SHAPES)
        for dtype in EPSILON
        if shape[0] * shape[1] * dtype.itemsize <= MOST
    ]
    assert len(wanted) == len(found[0][0])
    for (want, dtype), data in zip(wanted, found[0][0]):
        got = torch.frombuffer(bytearray(data), dtype=dtype).view(want.shape).double()
        assert ((got - want).abs() <= EPSILON[dtype] * want.abs() + 1e-7).all(), dtype


def test_a_graph_gives_the_same_at_every_replay(found):
    first, second = (numbers(rank, 7, (16, 4096), torch.float32) for rank in range(2))
    for _ in range(40):
        total = first + second
        first, second = total * 0.25, total * 0.75
    for rank, want in enumerate((first, second)):
        assert set(found[rank][1]) == {want.numpy().tobytes()}


def test_blocks_are_read_in_the_memory_of_the_other_gpu(found):
    source = numbers(0, 9, (1, 2 * math.prod((2, 6, 16, 2, 64))), torch.float16).view(2, 2, 6, 16, 2, 64)[1]
    want = torch.zeros((2, 3, 16, 2, 64), dtype=torch.float16)
    want[:, 2], want[:, 0] = source[:, 4], source[:, 1]
    assert found[1][2] == [want.numpy().tobytes()]
