// A small part of Markdown, built of DOM nodes: what the model writes is text and never becomes markup of the page.

/** Show `text` in `container`. Blocks that are as they were are left alone, so that a growing text costs little. */
export function renderMarkdown(container, text) {
  const found = blocks(text);
  const shown = container.markdownSources ?? [];
  let same = 0;
  while (same < found.length && same < shown.length && found[same].key === shown[same]) same += 1;
  while (container.children.length > same) container.lastElementChild.remove();
  for (const block of found.slice(same)) container.append(element(block));
  container.markdownSources = found.map((block) => block.key);
}

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;

const TABLE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$|^\s*\|\s*:?-+:?\s*\|\s*$/;

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  const add = (block) => found.push({ ...block, key: JSON.stringify(block) });
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (fence) {
      const body = [];
      for (at += 1; at < lines.length && !lines[at].trim().startsWith(fence[1]); at += 1) body.push(lines[at]);
      at += 1;
      add({ kind: "code", language: fence[2], text: body.join("\n") });
    } else if (!line.trim()) {
      at += 1;
    } else if (RULE.test(line)) {
      at += 1;
      add({ kind: "rule" });
    } else if (HEADING.test(line)) {
      const [, marks, title] = HEADING.exec(line);
      at += 1;
      add({ kind: "heading", level: marks.length, text: title });
    } else if (line.startsWith(">")) {
      const body = [];
      for (; at < lines.length && lines[at].startsWith(">"); at += 1) body.push(lines[at].replace(/^> ?/, ""));
      add({ kind: "quote", text: body.join("\n") });
    } else if (ITEM.test(line)) {
      const items = [];
      const indents = []; // of the lists that are open, outermost first
      const ordered = ITEM.exec(line)[2] !== undefined;
      for (; at < lines.length; at += 1) {
        const item = ITEM.exec(lines[at]);
        if (item) {
          const indent = item[1].length;
          while (indents.length > 1 && indent < indents.at(-1)) indents.pop();
          if (!indents.length || indent > indents.at(-1) + 1) indents.push(indent);
          if (indents.length === 1 && (item[2] !== undefined) !== ordered) break;
          items.push({ level: indents.length - 1, start: item[2], text: item[3] });
        } else if (lines[at].trim() && !FENCE.test(lines[at])) {
          items.at(-1).text += `\n${lines[at].trim()}`;
        } else {
          break;
        }
      }
      add({ kind: "list", items });
    } else if (line.includes("|") && TABLE.test(lines[at + 1] ?? "")) {
      const rows = [cells(line)];
      for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) rows.push(cells(lines[at]));
      add({ kind: "table", rows });
    } else {
      const body = [];
      const ends = [FENCE, HEADING, ITEM, RULE];
      for (; at < lines.length && lines[at].trim() && !(body.length && ends.some((e) => e.test(lines[at]))); at += 1) {
        body.push(lines[at]);
      }
      add({ kind: "paragraph", text: body.join("\n").trim() });
    }
  }
  return found;
}

function element(block) {
  if (block.kind === "code") return codeBlock(block.text, block.language);
  if (block.kind === "rule") return document.createElement("hr");
  if (block.kind === "list") return list(block.items);
  if (block.kind === "table") return table(block.rows);
  // The page's own headings are h1 and h2.
  const names = { heading: `h${Math.min(6, (block.level ?? 0) + 2)}`, quote: "blockquote", paragraph: "p" };
  const node = document.createElement(names[block.kind]);
  inline(node, block.text);
  return node;
}

function list(items) {
  const open = []; // lists, outermost first
  for (const item of items) {
    open.length = Math.min(open.length, item.level + 1);
    if (open.length <= item.level) {
      const inner = document.createElement(item.start === undefined ? "ul" : "ol");
      if (item.start !== undefined) inner.start = Number(item.start);
      open.at(-1)?.lastElementChild.append(inner);
      open.push(inner);
    }
    const li = document.createElement("li");
    inline(li, item.text);
    open.at(-1).append(li);
  }
  return open[0];
}

function table(rows) {
  const frame = document.createElement("div");
  frame.className = "table";
  frame.tabIndex = 0; // it scrolls
  const node = document.createElement("table");
  rows.forEach((row, at) => {
    const tr = node.insertRow();
    for (const text of row) {
      const cell = document.createElement(at ? "td" : "th");
      inline(cell, text);
      tr.append(cell);
    }
  });
  frame.append(node);
  return frame;
}

/** A block of code with a button that copies it. */
export function codeBlock(text, label = "") {
  const figure = document.createElement("figure");
  figure.className = "code-block";
  const caption = document.createElement("figcaption");
  const name = document.createElement("span");
  name.textContent = label;
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "plain small";
  copy.textContent = "Copy";
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Cannot copy";
    }
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  caption.append(name, copy);
  const pre = document.createElement("pre");
  const code = document.createElement("code");
  code.textContent = text;
  pre.append(code);
  pre.tabIndex = 0; // it scrolls
  figure.append(caption, pre);
  return figure;
}

const INLINE = /(`+)([^`](?:.*?[^`])?)\1(?!`)|\*\*(?=\S)(.+?)\*\*|(?<![\w*])\*(?=[^\s*])([^*\n]*?[^\s*])\*(?!\w)|\[([^\]\n]+)\]\((https?:\/\/[^\s()<>]+)\)/s;

function inline(node, text) {
  let rest = text;
  for (let match = INLINE.exec(rest); match; match = INLINE.exec(rest)) {
    node.append(rest.slice(0, match.index));
    const [whole, , code, bold, italic, title, address] = match;
    let part;
    if (code !== undefined) {
      part = document.createElement("code");
      part.textContent = code;
    } else if (address !== undefined) {
      part = document.createElement("a");
      part.href = address;
      part.rel = "noopener noreferrer";
      part.target = "_blank";
      part.textContent = title;
    } else {
      part = document.createElement(bold !== undefined ? "strong" : "em");
      inline(part, bold ?? italic);
    }
    node.append(part);
    rest = rest.slice(match.index + whole.length);
  }
  node.append(rest);
}
