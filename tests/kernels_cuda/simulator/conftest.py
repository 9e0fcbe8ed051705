"""These tests need NUMBA_ENABLE_CUDASIM before numba is imported: `test_simulator.py` runs them in a separate process."""

import os

collect_ignore_glob = [] if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1" else ["test_*.py"]
