"""Has torch leave cuDNN alone, whose plans tests/gpu does not answer for: convolutions take torch's own kernels."""

import importlib.abc
import importlib.util
import sys


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_without(module):
            load(module)
            module.backends.cudnn.enabled = False
            module.backends.cuda.enable_cudnn_sdp(False)

        spec.loader.exec_module = load_without
        return spec


sys.meta_path.insert(0, _Finder())
