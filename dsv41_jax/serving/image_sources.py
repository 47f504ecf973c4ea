"""The images that requests name: data URLs, and public URLs where the server may fetch them."""

import asyncio
import io
import ipaddress
import threading
from concurrent.futures import Future
from typing import Any

import deepseek_recipe
from PIL import Image

from dsv41_jax.chat_messages import data_url_bytes
from dsv41_jax.serving.api_errors import ApiError
from dsv41_jax.serving.settings import ServeSettings

FETCH_SECONDS = 20.0
_FETCHES = 16
# Formats of the public APIs, and BMP. Pillow knows some that start other programs or reach for other files.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_NO_DESTINATIONS = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"),  # IPv4 addresses inside IPv6
        "168.63.129.16/32",  # Azure's host, which answers its guests alone
        *("100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24"),  # some versions of Python have these as global
    )
)


def is_public(address: str) -> bool:
    """Whether an address is a public host's: not loopback, link-local (and so metadata services), private, multicast,
    reserved, or IPv4 inside IPv6.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # a scope after % among others
        return False
    if ip.version == 6 and (ip.ipv4_mapped is not None or ip.packed[:12] == bytes(12) or ip.is_site_local):
        return False
    if not ip.is_global or ip.is_multicast or ip.is_reserved or ip.is_unspecified:
        return False
    return not any(ip.version == network.version and ip in network for network in _NO_DESTINATIONS)


def place(source: Any) -> str:
    """Where in the request an image stands."""
    return source.path.lstrip(".") or "image"


class ImageSources:
    """Gets and decodes the images of requests.

    The library's fetcher asks its filter about every address that it is about to connect to: after the name was
    resolved, and again for each redirect. So neither a name that resolves to a private address, nor one that resolves
    to another address the second time, gets past it. It gives up after a minute: a fetch runs in a thread that
    is not waited for longer than `FETCH_SECONDS`, and only so many such threads may be there.
    """

    def __init__(self, settings: ServeSettings):
        self._settings = settings
        fetcher = deepseek_recipe.ReqwestImageFetcher.with_max_bytes(settings.max_body_bytes)
        self._fetcher = fetcher.with_destination_filter(lambda host, address: is_public(address))
        self._slots = threading.BoundedSemaphore(_FETCHES)

    def check(self, sources: list[Any]) -> None:
        """Whether these may be asked for at all; ApiError 400 otherwise."""
        if len(sources) > self._settings.max_images:
            raise ApiError(400, f"the request has {len(sources)} images, this server takes {self._settings.max_images}")
        if not self._settings.image_urls:
            for source in sources:
                if source.kind == "url":
                    text = f"{place(source)}: this server fetches no images, send the image as a data URL"
                    raise ApiError(400, text, "image_url_refused")

    async def fetch(self, source: Any) -> bytes | str:
        """The bytes of an image, or its data URL as it is; ApiError 400 for a URL that cannot be fetched."""
        if source.kind == "data_url":
            return source.data_url
        if source.kind == "bytes":
            return source.data
        if not self._slots.acquire(blocking=False):
            raise ApiError(429, "too many images are being fetched", "queue_full", headers={"Retry-After": "5"})
        found: Future[bytes] = Future()
        # A thread of its own and a daemon: one that hangs holds up nothing, not even the end of the process.
        threading.Thread(target=self._fetch, args=(source.url, found), name="image-fetch", daemon=True).start()
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                return await asyncio.shield(asyncio.wrap_future(found))
        except TimeoutError:
            raise ApiError(400, f"{place(source)}: the image did not come in {FETCH_SECONDS:g} s") from None
        except deepseek_recipe.ImageError as error:
            raise ApiError(400, f"{place(source)}: the image cannot be fetched ({error.kind})") from None

    def _fetch(self, url: str, found: "Future[bytes]") -> None:
        try:
            found.set_result(self._fetcher.fetch(url))
        except Exception as error:  # handed to the one who waits
            found.set_exception(error)
        finally:
            self._slots.release()

    def decode(self, where: str, data: bytes | str) -> Image.Image:
        """An RGB image; ApiError 400 for anything else, or one above `max_image_pixels` by its header."""
        if isinstance(data, str):
            try:
                data = data_url_bytes(where, data)
            except ValueError as error:
                raise ApiError(400, str(error)) from None
        most = self._settings.max_image_pixels
        try:
            image = Image.open(io.BytesIO(data), formats=_FORMATS)  # reads the header only
            if image.width * image.height <= most:
                return image.convert("RGB")
        # On hostile bytes Pillow's decoders raise whatever their code happens to.
        except Exception as error:
            text = f"{where}: these {len(data)} bytes are no image that can be decoded ({type(error).__name__})"
            raise ApiError(400, text, "invalid_image") from None
        text = f"{where}: the image has {image.width} x {image.height} pixels, more than {most}"
        raise ApiError(400, text, "image_too_large")
