"""The prefix tree: its nodes are the engine's hashes, its state the folded state, and the page shows the same."""

import numpy as np
import pytest
from viz_runs import busy_trace

from minivllm.core.prefix import hash_block
from minivllm.viz.prefix_data import DEFAULT_ROOT, EVICTED, FORGOTTEN, HIT
from minivllm.viz.prefix_tree import PrefixTree, branches

RUNS = {
    "full": {},
    "salted": {"seed": 4, "salts": (None, "a", "b")},
    "hybrid": {"seed": 2, "kind": "hybrid", "blocks": 40},
}


@pytest.fixture(scope="module")
def traces():
    return {name: busy_trace(**how) for name, how in RUNS.items()}


@pytest.mark.parametrize("name", RUNS)
def test_the_tree_is_the_folded_state(traces, name):
    trace = traces[name]
    tree, blocks = PrefixTree(trace).tree, trace.to_pandas()["blocks"]
    for step, state in trace.states():
        now = tree.at(step)
        named = {block: content for block, content in enumerate(state.hashes) if content is not None}
        held = [tree.names[node] for node in np.flatnonzero(now.cached)]
        assert len(held) == len(set(held)) or name == "hybrid"  # a group has nodes of its own
        assert set(held) == set(named.values())
        users: dict = {}
        for block, content in named.items():
            users[content] = users.get(content, 0) + state.ref_cnt[block]
        mine: dict = {}
        for node in np.flatnonzero(now.cached):
            mine[tree.names[node]] = mine.get(tree.names[node], 0) + int(now.refs[node])
        assert mine == users
    kinds = tree.events[:, 2]
    assert (kinds == HIT).sum() == (blocks.event == "shared").sum() > 0
    assert (kinds == EVICTED).sum() == (blocks.event == "evicted").sum()
    assert (tree.events[kinds == EVICTED, 4] >= 0).all() and (kinds == FORGOTTEN).any()


def test_parents_are_the_blocks_before(traces):
    salted = 0
    for name in ("full", "salted"):
        tree = PrefixTree(traces[name]).tree
        for node, parent in enumerate(tree.parent):
            if tree.tokens[node, 0] < 0:
                continue  # of a request that was under way
            if parent >= 0:
                assert tree.depth[node] == tree.depth[parent] + 1
                assert hash_block(tree.names[parent], tree.tokens[node].tolist()) == tree.names[node]
            elif tree.depth[node] == 0:
                salted += hash_block(DEFAULT_ROOT, tree.tokens[node].tolist()) != tree.names[node]
    assert salted > 1


def test_branches_hold_every_node_once(traces):
    tree = PrefixTree(traces["full"]).tree
    laid = branches(tree)
    assert sorted(laid.nodes) == list(range(tree.num_nodes))
    for branch, parent in enumerate(laid.parent):
        chain = laid.nodes[laid.first[branch] : laid.first[branch + 1]]
        assert (tree.parent[chain[1:]] == chain[:-1]).all()
        assert parent < branch
        if parent >= 0:
            assert tree.parent[chain[0]] == laid.nodes[laid.first[parent + 1] - 1]


class Letters:
    def decode(self, ids):
        return "".join("abc"[i] for i in ids)


@pytest.mark.parametrize("name", ["full", "hybrid"])
def test_the_page_counts_the_same(traces, name, open_page, tmp_path):
    view = PrefixTree(traces[name], Letters())
    tree, laid = view.tree, view.branches
    page = open_page(view.save(tmp_path / "x.html"), width=1000)
    for step in range(0, tree.num_steps, max(1, tree.num_steps // 12)):
        cached, hits, refs, texts = page.evaluate(
            """step => { const { tree } = document.querySelector('.mv-prefix-tree').tree, s = tree.at(step);
            return [[...s.cached], [...s.hits], [...s.refs], tree.texts]; }""",
            step,
        )
        now = tree.at(step)
        assert [c > 0 for c in cached] == now.cached[laid.nodes].tolist()
        assert hits == now.hits[laid.nodes].tolist() and refs == now.refs[laid.nodes].tolist()
    assert texts == [Letters().decode([t for t in tree.tokens[node] if t >= 0]) for node in laid.nodes]


def test_a_click_pins_the_block_and_keys_walk(traces, open_page, tmp_path):
    view = PrefixTree(traces["full"], Letters())
    page = open_page(view.save(tmp_path / "x.html"), width=900, dark=True)
    step = view.tree.num_steps - 1
    page.evaluate("step => [...globalThis.minivllmCursors.values()][0].go(step)", step)
    page.locator(".mv-tree-pane").focus()
    state, names = view.trace.at(step), view.tree.names
    cached = view.tree.at(step).cached
    pinned = 0
    for _ in range(12):
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        text = page.locator(".mv-lanes-detail").inner_text()
        assert "found" in text
        block = page.evaluate("[...globalThis.minivllmCursors.values()][0].block")
        if block is not None:
            assert state.hashes[block["id"]] in {names[node] for node in np.flatnonzero(cached)}
            pinned += 1
    assert pinned


def test_pictures_words_and_a_run_without_a_cache(traces):
    view = PrefixTree(traces["full"], Letters())
    assert view.to_png().startswith(b"\x89PNG") and view.trace.plot_prefix_tree() is not None
    assert f"{view.tree.num_nodes} different blocks cached" in view.summary()
    with pytest.raises(IndexError, match="step 999 of a trace with"):
        view.plot(step=999)
