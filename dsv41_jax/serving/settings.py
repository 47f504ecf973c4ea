"""What a server is told: the fields of `configs/serve_*.py` and the flags of `launch/serve.py`."""

import dataclasses

from dsv41_jax.settings import Settings, setting

_MEGABYTE = 1 << 20


@dataclasses.dataclass(frozen=True)
class ServeSettings(Settings):
    """Checked settings of a server; the metadata of each field has its help line.

    Raises:
        ValueError: naming the setting, its value and what is allowed. TypeError: a value of another kind.
    """

    model: str = setting("demo", '"demo", a released-format folder, an Orbax folder, or a hub id')
    revision: str | None = setting(None, "of a hub id: a branch, tag or commit")
    served_name: str | None = setting(None, "the model's name in the API (default: the last part of --model)")
    numerics: str = setting("released", "released, noquant or float32")
    implementation: str = setting("auto", "kernels or plain code: auto, reference, tpu, gpu or interpret")
    engram: str = setting("device", "where Engram tables are: device, host or mmap")
    expert_storage: str = setting("fp4", "how experts are stored on the devices: fp4, fp8 or bf16")
    mesh: str | None = setting(None, "spread over all devices: DATAxCONTEXTxTENSOR, e.g. 4x1x4 (default: one device)")
    dispatch: str | None = setting(None, "on a mesh, how tokens reach experts: gather, all_to_all or ragged")

    rows: int = setting(16, "requests that run at once; their windows are allocated for it", least=1)
    max_len: int = setting(8192, "most tokens of a request, prompt and answer together", least=128)
    pages: int | None = setting(None, "pages of 128 tokens of all requests together (default: enough for every row)")
    reserve_tokens: int = setting(512, "tokens of an answer that pages are kept for when a request starts", least=1)
    prefill_block: int | None = setting(None, "tokens of a prompt that one step reads (default: by the devices)")
    decode_rows: int | None = setting(None, "rows that one decode step takes (default: by the devices)")
    max_stall_ms: float = setting(250.0, "longest that reading prompts may delay the texts that are written", least=1)
    default_max_tokens: int = setting(2048, "tokens of an answer where the client does not say", least=1)

    host: str = setting("127.0.0.1", "address to listen at; 0.0.0.0 for all")
    port: int = setting(8000, "port to listen at; 0 for a free one", least=0, most=65535)
    api_key_file: str | None = setting(None, "file of API keys, one a line (or DSV41_API_KEYS); none: anyone may ask")
    cors_origins: tuple[str, ...] = setting((), "origins of web pages that may call the API")
    max_queued: int = setting(256, "requests that may wait; more are told to come again", least=0)
    max_body_bytes: int = setting(32 * _MEGABYTE, "largest request body", least=1024)
    max_images: int = setting(16, "most images of a request", least=0)
    max_image_pixels: int = setting(40_000_000, "most pixels of an image", least=1)
    image_urls: bool = setting(False, "fetch images from public URLs that clients name")
    request_seconds: float = setting(600.0, "a request ends unfinished after this long", least=0.001)
    idle_seconds: float = setting(30.0, "longest silence of a client that sends or should receive", least=0.001)
    drain_seconds: float = setting(120.0, "after SIGTERM, how long running requests may go on", least=0)
    log_prompts: bool = setting(False, "write prompts and answers to the log")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ValueError("model='': a name or a folder is needed")
