"""`python -m model_sizes`, a part of `make facts`: writes tensors.json and docs/benchmarks/sizing.md."""

from __future__ import annotations

from model_sizes.page import PAGE, page, read_config
from model_sizes.tensors import FILE, meta_tensors, tensors_text
from rayloom_operator.api.shipped_facts import published_models


def main() -> None:
    models = published_models()
    served = [name for name, model in models.items() if model.facts is not None]
    tensors = {name: meta_tensors(read_config(name)) for name in served}
    for path, text in {FILE: tensors_text(tensors), PAGE: page(models, tensors)}.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(PAGE.parents[2])}")


if __name__ == "__main__":
    main()
