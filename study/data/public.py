"""The public data sets that `study data get` knows (sources.py finds and packs them)."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A public data set: how torchvision knows it, and what it is packed from."""

    torchvision: str
    """Its class in torchvision.datasets."""
    present: tuple[str, ...]
    """Files or folders (under torchvision's root) of which one is there when the data set is."""
    splits: tuple[Mapping[str, object], Mapping[str, object]]
    """Arguments of that class for the training and the test split."""
    classes: tuple[str, ...] = ()
    """Only where torchvision's class does not carry them."""
    debian: str | None = None
    """Debian's package of it."""

    @property
    def is_idx(self) -> bool:
        return self.present[0].endswith("/raw")


BY_FLAG = ({"train": True}, {"train": False})
BY_NAME = ({"split": "train"}, {"split": "test"})
SOURCES: dict[str, Source] = {
    "fashion-mnist": Source("FashionMNIST", ("FashionMNIST/raw",), BY_FLAG, debian="dataset-fashion-mnist"),
    "mnist": Source("MNIST", ("MNIST/raw",), BY_FLAG),
    "cifar10": Source("CIFAR10", ("cifar-10-batches-py", "cifar-10-python.tar.gz"), BY_FLAG),
    "cifar100": Source("CIFAR100", ("cifar-100-python", "cifar-100-python.tar.gz"), BY_FLAG),
    "stl10": Source("STL10", ("stl10_binary", "stl10_binary.tar.gz"), BY_NAME),
    "svhn": Source("SVHN", ("train_32x32.mat",), BY_NAME, classes=tuple("0123456789")),
}
