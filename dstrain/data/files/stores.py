"""Stores behind an address, by fsspec: how they are reached, and what their errors mean.

A store that fails, or answers slowly, is asked again, over 31 s; then the run ends as NotRead, and no file is at fault.
"""

import errno
import time
from collections.abc import Callable
from typing import Any

from dstrain.data.files.storage import with_retries
from dstrain.recipe import ConfigError, NotRead

_TRIES = 5  # over 31 s
_FIRST_TRIES = 3  # over 1 s: at the start the address is as likely at fault
_NETWORK = {
    "aiohttp",
    "botocore",
    "aiobotocore",
    "gcsfs",
    "google",
    "httpx",
    "httpx2",
    "requests",
    "urllib3",
    "huggingface_hub",
}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile of ~/.aws",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login",
    "hf": "HF_TOKEN, or hf auth login",
    "http": "user:password@ in the address, or a signed one",
}


class NoRanges(Exception):
    """A server sends whole files alone."""


class Missing(ConfigError, FileNotFoundError):
    """There is no such object at an address: a layout may look for one, and a user may have named one."""


class Store:
    """What answers to one scheme: s3, gs, hf, http or https. Connections are not pickled."""

    def __init__(self, scheme: str) -> None:
        self.scheme, self.of_the_web = scheme, scheme.startswith("http")
        self._fs: Any = None  # made when it is used, in the process that uses it

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fs": None}

    def ask(self, address: str, call: Callable[[], Any], reading: bool = False) -> Any:
        """What a store answers. ConfigError: it has no such object, or wants other credentials. NotRead: it fails.

        reading: samples are read, so that credentials that are no longer valid are NotRead, and no sample's fault.
        """
        began, tries = time.monotonic(), _TRIES if reading else _FIRST_TRIES

        def asked() -> Any:
            try:
                return call()
            except (ConfigError, NotRead):
                raise
            except Exception as error:
                raise _translated(error, address, NotRead if reading else ConfigError) from None

        try:
            return with_retries(asked, tries)
        except (ConfigError, NotRead):
            raise
        except OSError as error:
            raise NotRead(
                f"{address} cannot be read: the store does not answer, or not in full, in {tries} tries over "
                f"{time.monotonic() - began:.0f} s ({error.strerror}), and no file is at fault: look at the "
                "network and the address, then give the same command again"
            ) from None

    def system(self) -> Any:
        """The file system of this process: its connections and its thread do not survive a fork."""
        if self._fs is None:
            import fsspec

            options: dict[str, Any] = {"use_listings_cache": False}
            if self.of_the_web:
                try:
                    import aiohttp
                except ImportError:
                    raise self._without("aiohttp") from None
                options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(sock_connect=30, sock_read=60)}
            try:
                self._fs = fsspec.filesystem(self.scheme, **options)
            except ImportError as error:
                raise self._without(str(error)) from None
        return self._fs

    def _without(self, missing: str) -> ConfigError:
        return ConfigError(
            f"{self.scheme}:// needs a library that is not installed ({missing}): pip install 'dstrain[remote]'"
        )


def _translated(error: Exception, address: str, refused: type[Exception]) -> Exception:
    """A library's error as ConfigError or `refused` (the user's to mend), as OSError EIO (asked again), or as it is."""
    if address.startswith("http") and isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec calls whatever a web server answers "not found"
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if "range requests" in text:
        return NoRanges()
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return Missing(f"{address}: the store has no such object, folder or bucket: correct the address")
    if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in text:
        return refused(
            f"{address}: the store refuses it ({text}): give credentials that may read it, by "
            f"{_CREDENTIALS[address.partition('://')[0].replace('https', 'http')]}"
        )
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 416, 425, 429):
        return refused(f"{address}: the store refuses it ({text}): correct the address")
    roots = {kind.__module__.split(".")[0] for kind in type(error).__mro__}
    return OSError(errno.EIO, text) if isinstance(error, OSError) or roots & _NETWORK else error
