"""What does a live dashboard cost the engine? Steps per second with and without one, in turns.

    python benchmarks/dashboard.py [--seconds 60] [--model smollm2]

The engine decodes in a thread, as under a server; the dashboard looks 20 times a second and sends each sample to a widget, as in a
notebook (into a void: there is no browser). Goal: at most 3 % fewer steps.
"""

import argparse
import statistics
import threading
import time

from minivllm import LLM, SamplingParams
from minivllm.viz import Dashboard

GOAL = 0.03


def decode(llm: LLM, stop: threading.Event) -> None:
    """Keep eight requests running."""
    engine, number = llm.llm_engine, 0
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.8)
    while not stop.is_set():
        while engine.get_num_unfinished_requests() < 8:
            engine.add_request(f"r{number}", f"Story {number}: once upon a time", params)
            number += 1
        engine.step()
    engine.abort_request([f"r{i}" for i in range(number)])


def rate(llm: LLM, seconds: float) -> float:
    """Steps per second, over so many seconds."""
    before, start = llm.get_metrics()["num_steps"], time.perf_counter()
    time.sleep(seconds)
    return (llm.get_metrics()["num_steps"] - before) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="in all")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    pairs = 10
    with LLM(args.model, dtype="float32", max_model_len=512, num_gpu_blocks=256) as llm:
        stop = threading.Event()
        thread = threading.Thread(target=decode, args=(llm, stop))
        thread.start()
        rate(llm, 2.0)
        dashboard = Dashboard(llm)
        sent: list[dict] = []
        send = dashboard.widget.send
        dashboard.widget.send = lambda message: (sent.append(message), send(message))
        slower = []
        print(f"{'alone':>9} {'watched':>9}  steps/s")
        for pair in range(pairs):
            rates = {}
            for watched in (False, True) if pair % 2 == 0 else (True, False):
                if watched:
                    dashboard.start()
                rates[watched] = rate(llm, args.seconds / pairs / 2)
                dashboard.stop()
            slower.append(1 - rates[True] / rates[False])
            print(f"{rates[False]:>9.1f} {rates[True]:>9.1f}")
        stop.set()
        thread.join()
    looks = sum("samples" in message for message in sent) / (args.seconds / 2)
    cost = statistics.median(slower)
    print(
        f"frames sent a second: {looks:.1f}; slower by {cost:.2%} (median of {pairs} pairs; goal: at most {GOAL:.0%})"
    )


if __name__ == "__main__":
    main()
