"""Imported once, by the process that engine processes are forked from: vLLM, and no engine.

An import starts no thread of its own that a fork would lose (OpenBLAS's survive it).
"""

import os
from importlib import import_module

from tests.e2e.engine_environment import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # read when vLLM is imported
import_module("tests.e2e.engine_host")
