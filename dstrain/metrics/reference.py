"""Files of statistics that images are compared with: ours, and those of ADM, EDM, EDM2, clean-fid and pytorch-fid.

ours     .npz with KIND.mu, KIND.sigma, KIND.count, KIND.fingerprint and KIND.kept of each network, and of Inception
         also under ADM's names
ADM      .npz with mu, sigma, mu_s, sigma_s (for sFID), and arr_0, images of the set for precision and recall
others   .npz with mu and sigma (EDM, clean-fid, pytorch-fid) or feats (clean-fid's for KID); .pkl of EDM2
"""

import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dstrain.disk.atomic import replace_file
from dstrain.metrics.network import Features
from dstrain.metrics.statistics import Statistics
from dstrain.recipe import ConfigError, explain_write_errors

SUFFIXES = (".npz", ".pkl")
INCEPTIONS = ("inception", "torchscript", "pytorch-fid", "clean-fid")  # networks that mu and sigma may be of
_EDM2 = {"fid": INCEPTIONS, "fd_dinov2": ("dinov2",)}


def read_reference_statistics(path: Path, networks: Iterable[Features], device: torch.device) -> dict[str, Statistics]:
    """Reads statistics of `networks` from a file. Returns {network's name: statistics}, without networks that the file
    does not have.

    Raises ConfigError if the file cannot be read, or if its arrays are damaged or were made with other weights or
    another preprocessing.
    """
    try:
        arrays = _read_edm2_pickle(path) if path.suffix == ".pkl" else _read_npz_statistics(path)
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        zipfile.BadZipFile,
        pickle.UnpicklingError,
    ) as error:
        raise ConfigError(
            f"--reference {path} cannot be read ({type(error).__name__}: {error}); give a file of ours, "
            "ADM's, EDM's, EDM2's or clean-fid's, or images"
        ) from None
    statistics = {network.name: _select_statistics(network, arrays, path, device) for network in networks}
    return {name: of_network for name, of_network in statistics.items() if of_network is not None}


def can_hold_images(path: Path) -> bool:
    """Returns whether images may be read from a path: False for a .pkl and for an .npz without arr_0, True for any
    other path, which is not read. Raises ConfigError if nothing exists at the path.
    """
    if not path.exists():
        raise ConfigError(f"--reference {path}: there is no such file or folder")
    if path.suffix != ".npz":
        return path.suffix != ".pkl"
    with np.load(path, allow_pickle=False) as file:
        return "arr_0" in file.files


def _select_statistics(
    network: Features, arrays: dict[str, Any], path: Path, device: torch.device
) -> Statistics | None:
    """Returns the statistics of one network, or None if `arrays` hold none of it. `arrays` are {name: array}, as read
    from the file `path`. If no name contains a network's name, they are Inception's.

    Raises ConfigError if an array has a wrong shape or values that are not finite, if sigma is no covariance, or if the
    arrays were made with another network.
    """
    name, end = network.name, ""
    prefix = f"{name}." if any("." in key for key in arrays) else ""
    if not prefix and name == "inception-spatial":
        end = "_s"
    elif not prefix and name not in INCEPTIONS:  # statistics without a network's name are Inception's
        return None
    mean, covariance = arrays.get(f"{prefix}mu{end}"), arrays.get(f"{prefix}sigma{end}")
    kept = None if end else arrays.get(f"{prefix}kept", arrays.get(f"{prefix}feats"))
    if mean is None and kept is None:
        return None
    mean, covariance, kept = (
        _convert_and_check_array(rows, f"--reference {path}: {prefix}{key}", axes)
        for rows, key, axes in (
            (mean, f"mu{end}", "D"),
            (covariance, f"sigma{end}", "DD"),
            (kept, "kept or feats", "nD"),
        )
    )
    for rows in (mean, covariance, kept):
        if rows is not None and rows.shape[-1] != network.size:
            raise ConfigError(
                f"--reference {path} holds statistics of {rows.shape[-1]} features, and {name} has "
                f"{network.size}: name the network that they were made with"
            )
    if covariance is not None and not (np.allclose(covariance, covariance.T) and (covariance.diagonal() >= 0).all()):
        raise ConfigError(
            f"--reference {path}: {prefix}sigma{end} is no covariance, which is symmetric and has no "
            "negative variance: write the file anew"
        )
    fingerprint = arrays.get(f"{prefix}fingerprint")
    if fingerprint is not None and str(fingerprint) != network.fingerprint:
        raise ConfigError(
            f"--reference {path} was made with other weights or another preprocessing of {name} "
            f"({str(fingerprint)[:8]}, here {network.fingerprint[:8]}): give those, or write it anew"
        )
    count = arrays.get(f"{prefix}count")
    return Statistics(
        _convert_to_tensor_or_none(mean, torch.float64, device),
        _convert_to_tensor_or_none(covariance, torch.float64, device),
        None if count is None else int(count),
        _convert_to_tensor_or_none(kept, torch.float32, device),
        None if fingerprint is None else str(fingerprint),
    )


def _convert_and_check_array(rows: Any, name: str, axes: str) -> np.ndarray | None:
    """Returns `rows` as a numpy array, or None if it is None. Raises ConfigError, which begins with `name`, if the
    array is empty, has other axes than `axes`, or a value that is not finite.

    axes   one letter for each axis, such as "nD"; "DD" means a square matrix
    """
    if rows is None:
        return None
    rows = np.asarray(rows)
    shape = f"({', '.join(axes)}{',' if len(axes) == 1 else ''})"
    if (
        rows.dtype.kind not in "fiu"
        or rows.ndim != len(axes)
        or not rows.size
        or (len(set(axes)) == 1 and len(set(rows.shape)) > 1)
    ):
        raise ConfigError(
            f"{name} is {rows.dtype} of shape {rows.shape}, and numbers of shape {shape} are expected: "
            "write the file anew"
        )
    if not np.isfinite(rows).all():
        raise ConfigError(f"{name} holds values that are not finite: write the file anew")
    return rows


def _convert_to_tensor_or_none(array: np.ndarray | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Converts an array to a tensor of this dtype on a device; returns None for None."""
    return None if array is None else torch.from_numpy(array).to(device, dtype)


def _read_npz_statistics(path: Path) -> dict[str, Any]:
    """Returns {name: array} of an .npz, without the images, labels and prompts that it may hold (arr_0, arr_1,
    prompts). Raises ValueError if the file is no .npz.
    """
    if not zipfile.is_zipfile(path):  # numpy would advise to read it unsafely
        raise ValueError("it is no whole .npz")
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files if not name.startswith("arr_") and name != "prompts"}


class _Arrays(pickle.Unpickler):
    """Unpickles NumPy arrays, dictionaries and plain values. Raises UnpicklingError for any other class or function,
    since it could run code.
    """

    def find_class(self, module: str, name: str) -> Any:
        if name in ("_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer") and module.split(".")[0] == "numpy":
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}, and only arrays are read from a .pkl")


def _read_edm2_pickle(path: Path) -> dict[str, Any]:
    """Reads a .pkl of EDM2, {"fid": {"mu": ..., "sigma": ...}, "fd_dinov2": ...}. Returns {name: array} with the names
    that dstrain's files use, such as dinov2.mu. Inception's arrays are returned once for each of the names in
    INCEPTIONS.
    """
    with open(path, "rb") as file:
        content = _Arrays(file).load()
    return {
        f"{kind}.{key}": content[metric][key]
        for metric, kinds in _EDM2.items()
        if metric in content
        for kind in kinds
        for key in ("mu", "sigma")
    }


def is_written_by_dstrain(path: Path) -> bool:
    """Returns whether `write_reference_statistics` has written a file, judging by the names of its arrays."""
    return zipfile.is_zipfile(path) and any(
        name.endswith(".fingerprint.npy") for name in zipfile.ZipFile(path).namelist()
    )


def write_reference_statistics(path: Path, statistics: dict[str, Statistics]) -> None:
    """Writes {network's name: statistics} to an .npz; replaces a file at `path`. Raises ConfigError if the file cannot
    be written, such as on a full disk.
    """
    arrays = {}
    for name, of_network in statistics.items():
        values = {"mu": of_network.mean, "sigma": of_network.covariance, "kept": of_network.kept}
        arrays |= {f"{name}.{key}": value.cpu().numpy() for key, value in values.items() if value is not None}
        arrays |= {f"{name}.count": np.array(of_network.count), f"{name}.fingerprint": np.array(of_network.fingerprint)}
        if name in ("inception", "inception-spatial"):
            end = "_s" if name == "inception-spatial" else ""
            arrays |= {f"mu{end}": arrays[f"{name}.mu"], f"sigma{end}": arrays[f"{name}.sigma"]}
    with (
        explain_write_errors(f"--write-reference {path}", "make room, or name a file elsewhere"),
        replace_file(path) as new,
        open(new, "wb") as file,  # a path would get the suffix .npz
    ):
        np.savez(file, **arrays)
