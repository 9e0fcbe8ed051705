"""What the Ray executor does beside the steps, without a cluster."""

import os
from types import SimpleNamespace

from minivllm.core import ray_cluster
from minivllm.runtime.executors import ray_executor
from minivllm.runtime.executors.ray_executor import RankActor, RayWorkers


class Actors:
    """Stands for `ray`, and for an actor whose calls return their own references."""

    def __init__(self, answers):
        self.answers = answers

    def wait(self, refs, num_returns, timeout):
        return [ref for ref in refs if self.answers[ref] is not None], []

    def get(self, ref):
        if isinstance(answer := self.answers[ref], Exception):
            raise answer
        return answer


def test_a_rank_that_has_ended_does_not_hide_what_the_others_say():
    workers = RayWorkers.__new__(RayWorkers)
    workers.size, workers.pids = 3, [10, 11, 12]
    workers._ray = Actors({0: "in a matmul", 1: RuntimeError("actor died"), 2: None})
    workers.actors = [
        SimpleNamespace(stacks=SimpleNamespace(options=lambda rank=rank, **_: SimpleNamespace(remote=lambda: rank)))
        for rank in range(3)
    ]
    assert workers.stacks() == (
        "worker 0 of 3 (process 10):\nin a matmul\n"
        "worker 1 of 3 (process 11):\nhas ended: RuntimeError\n"
        "worker 2 of 3 (process 12):\ndoes not react: stopped"
    )


def test_a_rank_removes_its_own_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_executor, "import_ray", lambda: SimpleNamespace(get_gpu_ids=list))
    actor = RankActor()
    _, folder, _, _ = actor.where("127.0.0.1", str(tmp_path))
    assert os.listdir(tmp_path) == [os.path.basename(folder)]
    actor.end()
    actor.clean()
    assert os.listdir(tmp_path) == []


def test_an_empty_address_is_none(monkeypatch):
    asked = []
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setattr(ray_cluster, "import_ray", lambda: SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setattr(ray_cluster, "_connect", lambda ray, address: asked.append(address))
    monkeypatch.setattr(ray_cluster._Connection, "users", 0)
    monkeypatch.setattr(ray_cluster._Connection, "foreign", False)
    ray_cluster.join_cluster()
    assert asked == [None]
