"""The arrays of a step: places, contents, fixed addresses, what does not fit."""

import numpy as np
import pytest
import torch

from minivllm.attention.step_buffer import StepBuffer


def test_arrays_arrive_at_aligned_and_equal_addresses():
    buffer, addresses = StepBuffer(4096, torch.device("cpu")), []
    for step in range(3):
        buffer.begin()
        arrays = [np.arange(3) + step, np.arange(10, dtype=np.int32).reshape(5, 2) * step, np.zeros(0, np.int64)]
        tensors = [buffer.put(a) for a in arrays]
        host, late = buffer.reserve((2, 2), np.int64)
        host[...] = step
        buffer.send()
        for array, tensor in zip(arrays, tensors):
            assert tensor.numpy().dtype == array.dtype and np.array_equal(tensor.numpy(), array)
        assert (late == step).all()
        addresses.append([t.data_ptr() for t in (tensors[0], tensors[1], late)])
        assert all(a % 16 == buffer.words.data_ptr() % 16 for a in addresses[-1])
    assert addresses[0] == addresses[1] == addresses[2]


def test_words_index_the_whole_buffer():
    buffer = StepBuffer(256, torch.device("cpu"))
    buffer.begin()
    buffer.put(np.zeros(3, np.int64))
    start = buffer.used // 4
    host, _ = buffer.reserve((2, 3), np.int32)
    host[...] = [[1, 2, 3], [4, 5, 6]]
    buffer.send()
    assert buffer.words[start : start + 6].tolist() == [1, 2, 3, 4, 5, 6]


def test_what_does_not_fit():
    buffer = StepBuffer(64, torch.device("cpu"))
    buffer.begin()
    large = np.arange(100)
    assert np.array_equal(buffer.put(large).numpy(), large) and buffer.used == 0
    with pytest.raises(ValueError, match="64 bytes of the buffer"):
        buffer.reserve((100,), np.int64)
