"""What the package offers, and what it must not need."""

import subprocess
import sys

import headrace_client
from headrace_client import errors


def test_all_is_sorted_and_exact():
    names = headrace_client.__all__
    assert sorted(names, key=lambda n: (not n.isupper(), n)) == names
    assert all(hasattr(headrace_client, name) for name in names)


def test_every_error_is_exported():
    assert set(errors.__all__) - {"rejection"} <= set(headrace_client.__all__)


def test_importing_the_client_loads_nothing_of_the_server():
    code = (
        "import sys, headrace_client, headrace_client.cli\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "server = {'gateway', 'jaxengine', 'kernels_pallas', 'jax', 'msgspec', 'numpy'}\n"
        "assert not loaded & server, loaded & server\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
