"""What the site makes of pages that are also read in the repository: links to files outside docs/ lead to copies."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\((\.\./)+(?P<path>[^)#\s]+)(?P<anchor>#[^)]*)?\)")
# Files outside docs/ that are pages of the site.
PAGES = {
    "README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}


def _copied(path: str) -> Path | None:
    file = ROOT / path
    file = next(iter(sorted(file.glob("__main__.py"))), file) if file.is_dir() else file
    return file if file.is_file() else None


def on_files(files, config):
    """Add the files outside docs/ that pages link to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_inside((ROOT / source).read_text())))
    for page in list(files.documentation_pages()):
        for found in LINK.finditer(page.content_string):
            file = _copied(found["path"])
            if file and found["path"] not in PAGES:
                name = f"files/{file.relative_to(ROOT)}.txt"
                if files.get_file_from_path(name) is None:
                    files.append(File.generated(config, name, content=file.read_text()))
    return files


def _inside(markdown: str) -> str:
    """The text of a file of the root as a page of docs/."""
    for path, page in PAGES.items():
        markdown = markdown.replace(f"]({path}", f"]({page}")
    return re.sub(r"\]\(docs/", "](", markdown)


def on_page_markdown(markdown, page, config, files):
    """Lead links out of docs/ to the copies; who searches for "change" does not mean the changelog."""
    if page.file.src_uri == PAGES["CHANGELOG.md"]:
        page.meta["search"] = {"exclude": True}

    def there(found):
        path, anchor = found["path"], found["anchor"] or ""
        if path in PAGES:
            return f"]({PAGES[path]}{anchor})"
        file = _copied(path)
        up = "../" * page.file.src_uri.count("/")
        return f"]({up}files/{file.relative_to(ROOT)}.txt)" if file else found[0]

    return LINK.sub(there, markdown)
