"""What does a live dashboard cost the engine?

    python benchmarks/dashboard.py [--seconds 60] [--model smollm2]

A notebook kernel is started. In it an engine decodes eight requests in a thread, and a dashboard is shown that looks 20 times a second
and sends what it sees through the kernel's own sockets. Windows without and with it take turns. Goal: at most 3 %.

The first figure is exact: the CPU time of the dashboard's thread and of the kernel's sending thread, per second. Nothing of the dashboard
runs in the engine's thread (a tracer that is set on it looks for such a call), so this is the most that it can take from the engine: the
interpreter's lock, or a core. The second is a ceiling: the time by the wall clock of every look with its sending, waiting for the lock and
for a core included. The third is what is left end to end, steps per second, as noisy as the machine.
"""

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path
from queue import Empty
from typing import Any

GOAL, RATE = 0.03, 20.0
HERE = Path(__file__).parent


class Engine:
    """Keeps eight requests running, in a thread."""

    def __init__(self, llm: Any) -> None:
        self.engine, self.thread, self.stop = llm.llm_engine, threading.Thread(target=self._run), threading.Event()
        self.foreign: set[str] | None = None  # with a set: files under viz/ of which a function ran in this thread
        self.thread.start()

    def _run(self) -> None:
        from minivllm import SamplingParams

        params, number = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.8), 0
        while not self.stop.is_set():
            while self.engine.get_num_unfinished_requests() < 8:
                self.engine.add_request(f"r{number}", f"Story {number}: once upon a time", params)
                number += 1
            if self.foreign is not None:
                sys.setprofile(self._see)
            self.engine.step()
            sys.setprofile(None)
        self.engine.abort_request([f"r{i}" for i in range(number)])

    def _see(self, frame: Any, event: str, _: Any) -> None:
        if "viz" in Path(frame.f_code.co_filename).parts:
            self.foreign.add(frame.f_code.co_filename)

    def steps(self) -> int:
        return self.engine.get_metrics()["num_steps"]


class Meter:
    """CPU seconds of threads, wall seconds of looks, frames; as differences since the last `read`."""

    def __init__(self, dashboard: Any, engine: Engine, sender: threading.Thread) -> None:
        self.monitor, self.engine, self.sender = dashboard.monitor, engine, sender
        self.looking, self.sent = 0.0, 0
        look, tell = self.monitor.look, self.monitor.on_sample
        self.monitor.look, self.monitor.on_sample = self._timed(look), self._timed(tell)
        send = dashboard.widget.send
        dashboard.widget.send = lambda message: (send(message), self._count(message))
        self.last = self._now()

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any) -> Any:
            begun = time.perf_counter()
            result = call(*args)
            self.looking += time.perf_counter() - begun
            return result

        return timed

    def _count(self, message: dict) -> None:
        self.sent += "samples" in message

    def _now(self) -> list[float]:
        threads = (self.monitor._thread, self.sender)
        cpu = [time.clock_gettime(time.pthread_getcpuclockid(t.ident)) if t and t.is_alive() else 0.0 for t in threads]
        return [time.perf_counter(), self.engine.steps(), *cpu, self.looking, self.sent]

    def read(self) -> dict[str, float]:
        now = self._now()
        wall, steps, own, sending, looking, sent = (b - a for a, b in zip(self.last, now, strict=True))
        self.last = now
        return {"rate": steps / wall, "own": own / wall, "sending": sending / wall, "looking": looking / wall, "sent": sent / wall}  # fmt: skip


def measure(model: str, seconds: float) -> None:
    """Runs in the kernel."""
    from IPython import get_ipython
    from IPython.display import display

    from minivllm import LLM
    from minivllm.viz import Dashboard

    with LLM(model, dtype="float32", max_model_len=512, num_gpu_blocks=256) as llm:
        engine = Engine(llm)
        try:
            time.sleep(2.0)
            dashboard = Dashboard(llm, RATE)
            display(dashboard)
            meter = Meter(dashboard, engine, get_ipython().kernel.iopub_thread.thread)
            engine.foreign = set()
            time.sleep(1.0)
            foreign, engine.foreign = engine.foreign, None
            report(*windows(dashboard, meter, seconds), foreign)
        finally:
            engine.stop.set()
            engine.thread.join()


def windows(dashboard: Any, meter: Meter, seconds: float, pairs: int = 10) -> tuple[list[dict], list[dict]]:
    """What the meter read without and with the dashboard, in turns."""
    read: dict[bool, list[dict]] = {False: [], True: []}
    for pair in range(pairs):
        for watched in (False, True) if pair % 2 == 0 else (True, False):
            dashboard.start() if watched else dashboard.stop()
            time.sleep(0.1)
            meter.read()
            time.sleep(seconds / pairs / 2)
            read[watched].append(meter.read())
    dashboard.stop()
    return read[False], read[True]


def line(what: str, values: list[float]) -> float:
    """Prints the median, and the whole range; returns the median."""
    middle = statistics.median(values)
    print(f"{what:62} {middle:7.2%}  ({min(values):.2%} to {max(values):.2%})")
    return middle


def report(alone: list[dict], watched: list[dict], foreign: set[str]) -> None:
    frames = statistics.median(w["sent"] for w in watched)
    rates = [statistics.median(w["rate"] for w in some) for some in (alone, watched)]
    print(
        f"{len(watched)} windows each; {frames:.1f} frames a second; {rates[0]:.1f} steps a second alone, {rates[1]:.1f} watched"
    )
    print(f"{'calls of the dashboard in the thread of the engine':62} {len(foreign):6}")
    own = line("CPU time of the dashboard's and the sending thread", [w["own"] + w["sending"] for w in watched])
    line("  of that, the thread that sends the kernel's messages", [w["sending"] for w in watched])
    line("looks with their sending, by the wall clock (a ceiling)", [w["looking"] + w["sending"] for w in watched])
    line(
        "end to end: fewer steps a second, pair by pair",
        [1 - w["rate"] / a["rate"] for a, w in zip(alone, watched, strict=True) if a["rate"]],
    )
    print(f"goal: at most {GOAL:.0%} of CPU time, {own / GOAL:.2f} of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="in all")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import dashboard; dashboard.measure({args.model!r}, {args.seconds})"
    try:
        reply = client.execute_interactive(code, timeout=args.seconds + 300, output_hook=show)
    except (Empty, TimeoutError):
        sys.exit("the kernel did not answer")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    sys.exit(reply["content"]["status"] != "ok")


def show(message: dict) -> None:
    """Print what the kernel prints, and its errors."""
    content = message["content"]
    if message["msg_type"] == "stream":
        print(content["text"], end="", flush=True)
    elif message["msg_type"] == "error":
        print("\n".join(content["traceback"]), file=sys.stderr)


if __name__ == "__main__":
    main()
