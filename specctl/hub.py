"""Whether the Hugging Face hub can be reached, and the advice to download a model."""

import socket
from urllib.parse import urlsplit

DOWNLOAD = "download it first: hf download OWNER/NAME --local-dir DIR; then give DIR"
PATIENCE_S = 2.0  # seconds to wait for a connection
PORTS = {"": 80, "http": 80, "https": 443}  # of the others, SOCKS proxies, 1080


def connect() -> None:
    """Connect to the hub, or to the proxy that the environment names for it, unless HF_HUB_OFFLINE is set. Without this
    check `huggingface_hub` would retry for half a minute per file, and print every try.

    Raises ConnectionError, which names the host and the cause.
    """
    from urllib.request import getproxies, proxy_bypass  # with HTTP and TLS, which most commands do not need

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    place = urlsplit(constants.ENDPOINT)
    what = str(place.hostname)
    proxies = {} if proxy_bypass(what) else getproxies()
    if proxy := proxies.get(place.scheme) or proxies.get("all"):
        place = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        what = f"the proxy {place.hostname}"
    try:
        socket.create_connection((place.hostname, place.port or PORTS.get(place.scheme, 1080)), PATIENCE_S).close()
    except (OSError, ValueError) as error:
        raise ConnectionError(f"{what} cannot be reached ({getattr(error, 'strerror', None) or error})") from error
