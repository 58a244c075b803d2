"""The kernels that every test of the contract runs over."""

import pytest

from attention_kernels import ready_kernel
from kernels_pallas.choice import KernelUnavailable


@pytest.fixture(params=["reference", "native"])
def kernel(request):
    """The name of a kernel that works here."""
    try:
        return ready_kernel(request.param)
    except KernelUnavailable as error:
        pytest.skip(str(error))
