"""The comparison of a wheel with the checkout finds what is missing in it and what differs."""

from pathlib import Path
from zipfile import ZipFile

from .wheel import ROOT, differences, package_files


def test_a_wheel_has_each_file_of_each_package_as_it_is(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("same.py", "other.py", "missing.properties")}
    for name, path in files.items():
        path.write_text(name)
    with ZipFile(tmp_path / "one.whl", "w") as archive:
        archive.write(files["same.py"], "same.py")
        archive.writestr("other.py", "")
    assert differences(tmp_path / "one.whl", files) == ["missing.properties", "other.py"]


def test_the_files_of_all_packages_are_compared() -> None:
    files = package_files(ROOT)
    assert files["martlet/broker.py"] == ROOT / "core/martlet/broker.py"
    assert files["martlet_spark/pipelines/log4j2.properties"].exists()
    assert {name.partition("/")[0] for name in files} >= {
        "martlet",
        "martlet_client",
        "martlet_mqtt",
        "pyspark_martlet",
    }
