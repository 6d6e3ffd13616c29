"""What the documentation site has beyond the pages in `docs/`; mkdocs calls these functions.

Files that people look for at the top of a repository (README, CONTRIBUTING, …) are pages of the
site, too. They are read where the site is not, so they link to files of the repository, by full
address or relative to themselves. Here a link to a file that is a page becomes a link between
pages, which ``mkdocs build --strict`` checks together with its anchor; a link to any other file of
the repository gets its full address, if the file exists.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.structure.files import File, Files

TOP_FILES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
# A warning here fails a strict build.
LOG = logging.getLogger("mkdocs.plugins.site_hooks")


def on_files(files: Files, config: Any) -> Files:
    """Add the files from outside `docs/` as pages."""
    for source, page in TOP_FILES.items():
        text = Path(source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at pages of the site, or at the repository for what is no page."""
    source = {to: name for name, to in TOP_FILES.items()}.get(
        page.file.src_uri, f"docs/{page.file.src_uri}"
    )
    repository = config["repo_url"]
    address = re.compile(re.escape(repository) + "/(?:blob|raw|tree)/main/(.+)")

    def redirect(match: re.Match[str]) -> str:
        target, anchor = match.group(1), match.group(2) or ""
        if full := address.fullmatch(target):
            path = full.group(1)
        elif ":" in target:
            parts = urlsplit(target)
            if parts.scheme not in ("https", "http") or "." not in parts.netloc:
                LOG.warning("%s links to '%s', which is no address", source, target)
            return match.group(0)
        else:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        to = TOP_FILES.get(path, path.removeprefix("docs/"))
        if path in TOP_FILES or (path.startswith("docs/") and files.get_file_from_path(to)):
            start = posixpath.dirname(page.file.src_uri) or "."
            return f"]({posixpath.relpath(to, start)}{anchor})"
        if Path(path).exists():
            kind = "tree" if Path(path).is_dir() else "blob"
            return f"]({repository}/{kind}/main/{path}{anchor})"
        # Dead: left as it is for mkdocs to complain about.
        return f"]({target if not full else path}{anchor})"

    # A number stays beside its deviation, also in narrow columns.
    markdown = markdown.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    # GitHub reads Markdown within HTML as it is; here it has to be asked for.
    markdown = re.sub(r'<(details|div class="[a-z]+")>', r'<\1 markdown="1">', markdown)
    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", redirect, markdown)
