"""The demo corpus: package formats on small packages made here, cleaning, and the fixed held-out rule."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib

import pytest

from dsv41_jax.training import corpus


def make_deb(path, files: dict[str, bytes]):
    """A Debian package with these files, `data.tar.xz` after an odd-sized member (ar pads those by one byte)."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo("./" + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    raw = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0"), ("data.tar.xz", packed.getvalue())):
        raw += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode() + content
        raw += b"\n" * (len(content) % 2)
    path.write_bytes(raw)
    return path


def compress(data: bytes, clear_after: int | None = None) -> bytes:
    """Unix `compress` without its header; optionally one clear code after so many codes."""
    bits, count, width, group = 0, 0, 9, 0

    def emit(code: int) -> None:
        nonlocal bits, count
        bits |= code << count
        count += width

    def next_group() -> None:
        nonlocal count, group
        count += (group - count) % (8 * width)
        group = count

    table, prefix, codes = {bytes([i]): i for i in range(256)}, b"", 0
    entries = 257  # of the reader, which learns an entry one code later
    first = True
    for byte in [data[i : i + 1] for i in range(len(data))] + [None]:
        if byte is not None and prefix + byte in table:
            prefix += byte
            continue
        emit(table[prefix])
        codes += 1
        if not first and entries < 1 << 16:
            entries += 1
        first = False
        if entries >= 1 << width and width < 16:
            next_group()
            width += 1
        if codes == clear_after and byte is not None:
            emit(256)
            next_group()
            width, table, entries, first = 9, {bytes([i]): i for i in range(256)}, 257, True
        elif byte is not None and len(table) + 1 < 1 << 16:
            table[prefix + byte] = len(table) + 1  # code 256 is the clear code
        prefix = byte
    return bits.to_bytes((count + 7) // 8, "little")


def verses(count: int) -> str:
    return "".join(f"Ge1:{i} And it was so, the {i * i} time.\n" for i in range(1, count + 1))


@pytest.mark.parametrize("clear_after", [None, 5, 700])
def test_lzw_round_trip(clear_after):
    data = verses(900).encode() + bytes(range(256)) * 4 + b"a" * 3000
    assert corpus.lzw(compress(data, clear_after)) == data


def test_deb_errors(tmp_path):
    deb = make_deb(tmp_path / "a.deb", {"usr/x": b"1"})
    assert corpus.deb_files(deb, ["usr/x"]) == {"usr/x": b"1"}
    with pytest.raises(ValueError, match=r"no file usr/y"):
        corpus.deb_files(deb, ["usr/y"])
    (tmp_path / "b.deb").write_bytes(b"PK\3\4")
    with pytest.raises(ValueError, match=r"b\.deb: not a Debian package"):
        corpus.deb_files(tmp_path / "b.deb", ["usr/x"])
    cut = tmp_path / "cut.deb"
    cut.write_bytes(deb.read_bytes()[:72])
    with pytest.raises(ValueError, match="no data.tar member"):
        corpus.deb_files(cut, ["usr/x"])


def test_documents_of_two_packages(tmp_path):
    block = (
        '<title type="x-s">EXPOSITION</title><div sID="a" type="x-p"/><hi type="bold">Verse 3.</hi> '
        "<hi>The harbour</hi>\u00a0is wide \u2014and the sea &amp; sky \u05de\u05d2 are <reference>calm</reference> "
        ". . . <div eID='a' type='x-p'/>WORKS UPON THE THIRD PSALM<div/>A book about it. London, 1640."
    ).encode()
    packed = zlib.compress(block)
    treasury = {
        corpus.TREASURY_MEMBER + ".czs": struct.pack("<III", 0, len(packed), len(block)),
        corpus.TREASURY_MEMBER + ".czz": packed,
    }
    text = ("Textfile\n" + verses(40) + "Exo1:1 Now these are the names.\n").encode()
    first, second = compress(text[:1000]), compress(text[1000:])
    start = 0x5C + 4 * 3
    offsets = struct.pack(">5I", 1000, 2, start, start + len(first), start + len(first) + len(second))
    bible = b"EC02Compressed Data File".ljust(0x54, b"\0") + offsets + first + second
    found = corpus.documents(
        make_deb(tmp_path / "t.deb", treasury), make_deb(tmp_path / "s.deb", {corpus.SCRIPTURE_MEMBER: bible})
    )
    assert [name for name, _ in found] == ["treasury/0", "scripture/Genesis", "scripture/Exodus"]
    assert found[0][1] == ["The harbour is wide--and the sea & sky are calm ..."]
    assert found[1][1][0] == "Genesis 1"
    assert found[1][1][1].startswith("And it was so, the 1 time. And it was so, the 4 time. ")
    assert all(500 <= len(line) < 600 for line in found[1][1][1:-1])
    assert found[2][1] == ["Exodus 1", "Now these are the names."]


@pytest.mark.parametrize(
    ("source", "clean"),
    [
        ("\u201cWhy,\u201d said he \u2014 \u2018tis Jehov\u00e6!", '"Why," said he--\'tis Jehovae!'),
        ("so be it. \u2014Luther.", "so be it. --Luther."),
        ("a  b\u202fc ,d ( ) e", "a b c,d e"),
    ],
)
def test_ascii_line(source, clean):
    assert corpus.ascii_line(source) == clean


@pytest.mark.parametrize(
    "label", ["Verse 3.", "Verses 1-2.", "Ver. 7, 8. --", "Verse 4 (first clause).", "Whole Psalm."]
)
def test_verse_labels_go(label):
    assert corpus.treasury_lines(f"{label} He is near.") == ["He is near."]


def test_blocks_and_held_out_rule():
    texts = [(name, [f"{name} {i} " + "x" * 1000 for i in range(700)]) for name in ("a", "b")]
    blocks = corpus.blocks(texts)
    assert "".join(b.text for b in blocks) == "".join(line + "\n" for _, lines in texts for line in lines)
    assert [i for i, b in enumerate(blocks) if b.held_out] == list(range(25, len(blocks), 50))
    assert [b.document for b in blocks if b.ends_document] == ["a", "b"]
    assert all(corpus.BLOCK_BYTES <= len(b.text) < corpus.BLOCK_BYTES + 1100 for b in blocks if not b.ends_document)
