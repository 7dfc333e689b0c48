"""Writes the pictures and the generated pages of the documentation: ``python -m docs.site``, or ``make pictures``."""

from . import generated

if __name__ == "__main__":
    for path, text in generated.files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(path.relative_to(generated.ROOT))
