"""A Markdown report as one HTML file that needs nothing else: no network, no other file, no script."""

import base64
from collections.abc import Collection, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

TYPES = {".svg": "image/svg+xml", ".png": "image/png"}
# the policy keeps a browser from fetching anything, whatever the text holds
PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 68rem; margin: 0 auto;
  padding: 1.5rem 1rem 4rem; }
body > p:first-of-type { font-size: 1.2rem; border-left: 5px solid #0072b2; background: #f1f6fa; padding: .8rem 1rem; }
h1 { font-size: 1.6rem; margin: 1.6rem 0 .4rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; border-bottom: 1px solid #ddd; padding-bottom: .2rem; }
figure { margin: 1.4rem 0 2rem; }
figure img { max-width: 100%; height: auto; display: block; margin: 0 auto; }
figcaption { color: #555; font-size: .9rem; margin: .4rem auto 0; max-width: 50rem; text-align: center; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #e2e2e2; padding: .25rem .6rem; text-align: left; white-space: nowrap; }
th { background: #f5f5f5; }
td:last-child { white-space: normal; overflow-wrap: anywhere; }
tr:hover td { background: #f8fafc; }
pre { background: #f6f6f6; padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .82rem; }
code { font-size: .9em; }
@media print { body { max-width: none; } figure, tr { break-inside: avoid; } }
</style>
</head>
<body>
$body
</body>
</html>
""")


def to_html(markdown: str, title: str, folder: Path, images: Collection[str]) -> str:
    """The page. The `images`, paths in `folder`, are put inside where the text shows them; any other stays text, as
    does HTML."""
    renderer = MarkdownIt("commonmark", {"html": False}).enable("table")
    renderer.add_render_rule("image", _figure)
    renderer.add_render_rule("table_open", lambda *_: '<div class="wide"><table>\n')
    renderer.add_render_rule("table_close", lambda *_: "</table></div>\n")
    return PAGE.substitute(title=escape(title), body=renderer.render(markdown, {"folder": folder, "images": images}))


def _figure(self: RendererHTML, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
    source, text = str(tokens[index].attrs["src"]), escape(tokens[index].content)
    if source not in env["images"]:  # a name in the text may look like an image
        return text
    file = env["folder"] / source
    data = base64.b64encode(file.read_bytes()).decode()
    image = f'<img src="data:{TYPES[file.suffix]};base64,{data}" alt="{text}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"
