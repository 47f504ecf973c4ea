"""English text of clear licence for the demo model, from two Debian packages.

* ``sword-comm-tdavid``: C. H. Spurgeon, The Treasury of David (1869-1885), public domain by its copyright file;
* ``bible-kjv-text``: the King James Version (1611), copyright expired by its copyright file.

Both come with ``apt-get download sword-comm-tdavid bible-kjv-text``. The packages are read in pure Python (``ar``,
``tar``, SWORD's zCom blocks, Unix ``compress``), so neither root nor dpkg is needed.

The text is ASCII, one paragraph (or line of verse) a line. A document is the commentary on one psalm, or one book of
scripture. Documents are cut into blocks of whole lines of about 8 KB; every 50th block is held out, by its number
alone. The Treasury quotes scripture, so 4% of the held-out words stand in a run of 12 words that training text
has too.
"""

from __future__ import annotations

import dataclasses
import html
import io
import itertools
import re
import struct
import tarfile
import unicodedata
import zlib
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 8192
HELD_OUT_EVERY = 50
HELD_OUT_PHASE = 25

TREASURY_MEMBER = "usr/share/sword/modules/comments/zcom/tdavid/ot"
SCRIPTURE_MEMBER = "usr/lib/bible.data"


# -- the package formats ----------------------------------------------------------------------------------------------


def deb_files(deb: str | Path, names: list[str]) -> dict[str, bytes]:
    """Reads the named files (paths without a leading ``./``) of a Debian binary package.

    Raises ValueError when the file is no Debian package, its data member is compressed in a way this Python cannot read
    (only gzip, bzip2 and xz are), or a name is not in it.
    """
    raw = Path(deb).read_bytes()
    if not raw.startswith(b"!<arch>\n"):
        raise ValueError(f"{deb}: not a Debian package (no ar header)")
    position = 8
    while position + 60 <= len(raw):
        header = raw[position : position + 60]
        member, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
        body = raw[position + 60 : position + 60 + size]
        if member.startswith("data.tar"):
            try:
                with tarfile.open(fileobj=io.BytesIO(body)) as archive:
                    files = {m.name.removeprefix("./"): m for m in archive.getmembers() if m.isfile()}
                    missing = [name for name in names if name not in files]
                    if missing:
                        raise ValueError(f"{deb}: no file {missing[0]} in the package")
                    return {name: archive.extractfile(files[name]).read() for name in names}
            except tarfile.ReadError as error:
                raise ValueError(f"{deb}: cannot read its member {member}: {error}") from error
        position += 60 + size + size % 2
    raise ValueError(f"{deb}: not a Debian package (no data.tar member)")


def sword_blocks(index: bytes, data: bytes) -> list[str]:
    """Inflates the blocks of a SWORD zCom module: ``.czs`` (offset, compressed bytes, bytes per block) and ``.czz``."""
    blocks = []
    for offset, packed, size in struct.iter_unpack("<III", index):
        block = zlib.decompress(data[offset : offset + packed])
        if len(block) != size:
            raise ValueError(f"zCom block at {offset}: {len(block)} bytes where the index says {size}")
        blocks.append(block.decode("utf-8"))
    return blocks


def lzw(data: bytes, max_width: int = 16) -> bytes:
    """Expands one Unix ``compress`` stream in block mode, its 3-byte header already removed."""
    clear, first_width = 256, 9
    width, table, out, previous = first_width, [bytes([i]) for i in range(256)] + [b""], [], None
    bit, group = 0, 0

    def aligned(bit: int, group: int, width: int) -> int:
        # compress writes codes in groups of eight: a change of width starts at the next group.
        return bit + (group - bit) % (8 * width)

    while bit + width <= 8 * len(data):
        start = bit >> 3
        code = (int.from_bytes(data[start : start + 4], "little") >> (bit & 7)) & ((1 << width) - 1)
        bit += width
        if code == clear:
            bit = group = aligned(bit, group, width)
            width, previous = first_width, None
            del table[clear + 1 :]
            continue
        if previous is None:
            entry = table[code]
        else:
            entry = table[code] if code < len(table) else previous + previous[:1]
            if len(table) < 1 << max_width:
                table.append(previous + entry[:1])
        out.append(entry)
        previous = entry
        if len(table) >= 1 << width and width < max_width:
            bit = group = aligned(bit, group, width)
            width += 1
    return b"".join(out)


def bible_data(raw: bytes) -> str:
    """Expands ``bible.data``: big-endian window size, window count and offsets at byte 84, one LZW stream a window."""
    if not raw.startswith(b"EC02Compressed Data File"):
        raise ValueError("bible.data: unknown magic number")
    size, count = struct.unpack_from(">II", raw, 0x54)
    offsets = struct.unpack_from(f">{count + 1}I", raw, 0x5C)
    windows = [lzw(raw[a:b]) for a, b in itertools.pairwise(offsets)]
    if any(len(window) != size for window in windows[:-1]):
        raise ValueError("bible.data: a window does not expand to its size")
    return b"".join(windows).decode("ascii")


# -- cleaning ---------------------------------------------------------------------------------------------------------

_BREAK = re.compile(r"</?title[^>]*>|<div\b[^>]*>|</?(?:item|l|lg|list|chapter|milestone)\b[^>]*>")
_TAG = re.compile(r"<[^>]*>")
_VERSE_LABEL = re.compile(
    r"^(?:(?:Verses?|Ver\.?|Vv?\.) ?[\dl][\d ,\-:&]*(?:and \d+)?(?: ?\([^)]*\))?|Whole Psalm)[., ]*"
    r"(?:\([^)]*clauses?\)[., ]*)?(?:--)? ?",
    re.IGNORECASE,
)
_HEADING = re.compile(
    r"^(?:EXPOSITION|DIVISIONS?|TITLE|EXPLANATORY NOTES.*|HINTS TO .*"
    r"|Psalms? \d+ OVERVIEW|Psalms? \d+:\d+\*?|[* ]+)\.?$"
)
_BIBLIOGRAPHY = re.compile(r"^WORKS? (?:UP)?ON ")
_SPELL = str.maketrans(
    {
        "\u2014": "--", "\u2013": "-", "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "`": "'",
        "\u00e6": "ae", "\u00c6": "Ae", "\u0153": "oe", "\u2022": "", "\u0082": "e", "{": "(", "}": ")", "|": "",
    }
)  # fmt: skip


def ascii_line(text: str) -> str:
    """One line of plain ASCII: no accents, typographic signs spelt, other scripts dropped, white space collapsed."""
    text = unicodedata.normalize("NFKD", text.translate(_SPELL)).encode("ascii", "ignore").decode()
    text = re.sub(r"[\x00-\x20\x7f]+", " ", text)
    text = re.sub(r"\.(?: ?\.){2,}", "...", text)
    text = re.sub(r"\(\s*\)", "", text)
    # The source writes "word --word"; a dash after a full stop is a signature and keeps its space.
    text = re.sub(r"(?<=[\w,;:)]) ?-- ?", "--", text)
    text = re.sub(r"-- +", "--", text)
    text = re.sub(r" +([,;:.?!)])(?!\.)", r"\1", text)
    return re.sub(r" {2,}", " ", text).strip()


def treasury_lines(block: str) -> list[str]:
    """The prose of one zCom block: no tags, no verse labels, no repeated section headings, no lists of other works."""
    lines, in_bibliography = [], False
    for part in _BREAK.split(block):
        line = ascii_line(html.unescape(_TAG.sub("", part)))
        if _BIBLIOGRAPHY.match(line):
            in_bibliography = True
        elif _HEADING.match(line):
            in_bibliography = False
            continue
        line = _VERSE_LABEL.sub("", line)
        if in_bibliography or sum(c.isalpha() for c in line) < 3:
            continue
        lines.append(line)
    return lines


_BOOKS = dict(
    pair.split("=")
    for pair in """
Ge=Genesis;Exo=Exodus;Lev=Leviticus;Num=Numbers;Deu=Deuteronomy;Josh=Joshua;Jdgs=Judges;Ruth=Ruth;1Sm=1 Samuel;
2Sm=2 Samuel;1Ki=1 Kings;2Ki=2 Kings;1Chr=1 Chronicles;2Chr=2 Chronicles;Ezra=Ezra;Neh=Nehemiah;Est=Esther;Job=Job;
Psa=Psalm;Prv=Proverbs;Eccl=Ecclesiastes;SSol=Song of Solomon;Isa=Isaiah;Jer=Jeremiah;Lam=Lamentations;Eze=Ezekiel;
Dan=Daniel;Hos=Hosea;Joel=Joel;Amos=Amos;Obad=Obadiah;Jonah=Jonah;Mic=Micah;Nahum=Nahum;Hab=Habakkuk;Zep=Zephaniah;
Hag=Haggai;Zec=Zechariah;Mal=Malachi;Mat=Matthew;Mark=Mark;Luke=Luke;John=John;Acts=Acts;Rom=Romans;
1Cor=1 Corinthians;2Cor=2 Corinthians;Gal=Galatians;Eph=Ephesians;Phi=Philippians;Col=Colossians;
1Th=1 Thessalonians;2Th=2 Thessalonians;1Tim=1 Timothy;2Tim=2 Timothy;Titus=Titus;Phmn=Philemon;Heb=Hebrews;
Jas=James;1Pet=1 Peter;2Pet=2 Peter;1Jn=1 John;2Jn=2 John;3Jn=3 John;Jude=Jude;Rev=Revelation
""".replace("\n", "").split(";")
)
_VERSE = re.compile(r"^(\d?[A-Za-z]+)(\d+):\d+ (.*)$")
_PARAGRAPH_CHARS = 500


def scripture_chapters(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields (book, lines) per chapter: a line "Genesis 1", then paragraphs of whole verses, without verse numbers.

    A paragraph ends at the first verse that closes a sentence after 500 characters; the source has no paragraph marks.
    """
    current, lines, paragraph = None, [], ""
    for row in text.splitlines()[1:]:
        match = _VERSE.match(row)
        if match is None:
            raise ValueError(f"bible.data: not a verse: {row[:60]!r}")
        book, chapter, verse = _BOOKS[match[1]], match[2], ascii_line(match[3])
        if (book, chapter) != current:
            if current is not None:
                yield current[0], lines + [paragraph] * bool(paragraph)
            current, lines, paragraph = (book, chapter), [f"{book} {chapter}"], ""
        paragraph = f"{paragraph} {verse}".strip()
        if len(paragraph) >= _PARAGRAPH_CHARS and paragraph[-1] in ".?!":
            lines.append(paragraph)
            paragraph = ""
    yield current[0], lines + [paragraph] * bool(paragraph)


# -- the corpus -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Block:
    """About 8 KB of whole lines of one document. ``ends_document``: the document's last block."""

    text: str
    document: str
    ends_document: bool
    held_out: bool


def documents(treasury_deb: str | Path, scripture_deb: str | Path) -> list[tuple[str, list[str]]]:
    """(name, lines) of every document: the Treasury's psalms in order, then the books of the King James Version."""
    members = deb_files(treasury_deb, [TREASURY_MEMBER + ".czs", TREASURY_MEMBER + ".czz"])
    found: list[tuple[str, list[str]]] = []
    for number, block in enumerate(sword_blocks(*members.values())):
        lines = treasury_lines(block)
        if lines:
            found.append((f"treasury/{number}", lines))
    books: dict[str, list[str]] = {}
    raw = deb_files(scripture_deb, [SCRIPTURE_MEMBER])[SCRIPTURE_MEMBER]
    for book, lines in scripture_chapters(bible_data(raw)):
        books.setdefault(f"scripture/{book}", []).extend(lines)
    return found + list(books.items())


def blocks(texts: list[tuple[str, list[str]]]) -> list[Block]:
    """Cuts documents into blocks: whole lines until 8 KB are reached. Block i is held out when i % 50 == 25."""
    result: list[Block] = []
    for name, lines in texts:
        pending: list[str] = []
        for position, line in enumerate(lines):
            pending.append(line)
            last = position == len(lines) - 1
            if last or sum(len(text) + 1 for text in pending) >= BLOCK_BYTES:
                held_out = len(result) % HELD_OUT_EVERY == HELD_OUT_PHASE
                result.append(Block("\n".join(pending) + "\n", name, last, held_out))
                pending = []
    return result
