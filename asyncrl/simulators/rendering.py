"""Draw pictures of a MuJoCo model with OpenGL, without a screen.

Order of choice: the environment variable ``MUJOCO_GL`` if it is set, else EGL, else OSMesa. Whether a
library is usable is found out with ctypes, before mujoco is asked, because mujoco's own failures are long
tracebacks.
"""

import atexit
import contextlib
import ctypes
import importlib
import os
import platform
import sys
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import AssetError

LIBRARIES: Final[dict[str, tuple[str, ...]]] = {
    "egl": ("libEGL.so.1", "libEGL.so"),
    "osmesa": ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so"),
}
"""What each backend loads, in the order in which the backends are tried."""

_OFF = ("disable", "disabled", "off", "false", "0")
_REMEDY = (
    "Install one (Debian, Ubuntu: `apt-get install libegl1 libgl1-mesa-dri` or `libosmesa6`; conda: "
    "`conda install -c conda-forge mesalib`), or set MUJOCO_GL to egl, osmesa or glfw."
)


def find_backend() -> str | None:
    """Name the OpenGL backend that rendering would use, or None when there is none. Imports no mujoco."""
    wanted = os.environ.get("MUJOCO_GL", "").lower().strip()
    if wanted in _OFF:
        return None
    if wanted in LIBRARIES:
        return wanted if _usable(wanted) else None
    if wanted not in ("", "enable", "enabled", "on", "true", "1"):
        return wanted
    if platform.system() != "Linux":
        return "cgl" if platform.system() == "Darwin" else "wgl"
    return next((backend for backend in LIBRARIES if _usable(backend)), None)


def require_backend() -> str:
    """Return what `find_backend` finds; a missing library is an error that says what to install.

    Raises:
        AssetError: No OpenGL library, or ``MUJOCO_GL`` names one that is not there or turns rendering off.
    """
    backend = find_backend()
    if backend is not None:
        return backend
    wanted = os.environ.get("MUJOCO_GL", "")
    if wanted.lower().strip() in _OFF:
        raise AssetError(
            f"MUJOCO_GL is {wanted!r}, which turns rendering off, but pictures are needed. Unset it."
        )
    seen = f"MUJOCO_GL is {wanted!r}, but no such library works" if wanted else "Neither EGL nor OSMesa works"
    raise AssetError(f"{seen} here, and the simulator needs OpenGL to draw. {_REMEDY}")


def load_mujoco() -> Any:
    """Import mujoco, also without OpenGL: its import fails when ``MUJOCO_GL`` names what is not there."""
    if "mujoco" in sys.modules:
        return sys.modules["mujoco"]
    before = os.environ.get("MUJOCO_GL")
    os.environ["MUJOCO_GL"] = find_backend() or "disable"
    try:
        return importlib.import_module("mujoco")
    finally:
        if before is None:
            del os.environ["MUJOCO_GL"]
        else:
            os.environ["MUJOCO_GL"] = before


def _usable(backend: str) -> bool:
    """Tell whether the library loads and, for EGL, whether it offers at least one device to draw with."""
    for name in LIBRARIES[backend]:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if backend != "egl" or _egl_devices(library) > 0:
            return True
    return False


def count_egl_devices() -> int:
    """Count the devices that EGL can draw with; 0 without EGL."""
    for name in LIBRARIES["egl"]:
        with contextlib.suppress(OSError):
            return _egl_devices(ctypes.CDLL(name))
    return 0


def _egl_devices(library: ctypes.CDLL) -> int:
    """Count the devices EGL can draw with; a loader without a driver has none."""
    if not hasattr(library, "eglGetProcAddress"):
        return 0
    library.eglGetProcAddress.restype = ctypes.c_void_p
    library.eglGetProcAddress.argtypes = [ctypes.c_char_p]
    address = library.eglGetProcAddress(b"eglQueryDevicesEXT")
    if not address:
        return 0
    query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))(
        address
    )
    count = ctypes.c_int(0)
    return count.value if query(0, None, ctypes.byref(count)) else 0


def open_context(backend: str, size: int) -> Any:
    """Create the off-screen context of this backend, whatever ``MUJOCO_GL`` was when mujoco was imported."""
    try:
        module = backend if backend in ("egl", "osmesa", "cgl") else "glfw"
        return importlib.import_module(f"mujoco.{module}").GLContext(size, size)
    except (ImportError, RuntimeError, AttributeError) as error:
        raise AssetError(f"The OpenGL backend {backend!r} did not start: {error}. {_REMEDY}") from error


class Renderer:
    """Draws one camera of a MuJoCo model into a square picture, supersampled.

    The picture is drawn `supersample` times larger and averaged down: a cube is 7 pixels wide at 64 x 64, so
    soft edges carry position information that hard edges lose. Bound to the thread that made it.

    Args:
        model: A ``mujoco.MjModel`` whose off-screen buffer is at least ``size * supersample`` wide. Other
            models compiled from the same text may be drawn too.
        size: Side of the picture in pixels.
        supersample: Rays per pixel and axis.
    """

    def __init__(self, model: Any, *, size: int, supersample: int) -> None:
        mujoco = load_mujoco()
        side = size * supersample
        self._size, self._supersample = size, supersample
        self._context: Any = open_context(require_backend(), side)
        self._context.make_current()
        self._scene = mujoco.MjvScene(model, maxgeom=100)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SKYBOX] = 0
        self._option = mujoco.MjvOption()
        self._option.sitegroup[:] = 0
        self._camera = mujoco.MjvCamera()
        self._buffers = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._buffers)
        self._rect = mujoco.MjrRect(0, 0, side, side)
        self._pixels = np.empty((side, side, 3), np.uint8)
        atexit.register(self.close)

    def draw(self, model: Any, state: Any, camera: str) -> NDArray[np.uint8]:
        """Draw the present state.

        Args:
            model: The ``mujoco.MjModel`` (its colours are read anew each time).
            state: Its ``mujoco.MjData``.

        Returns:
            ``[size, size, 3]`` uint8, a new array, first row on top.
        """
        mujoco = load_mujoco()
        self._context.make_current()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._camera.fixedcamid = model.camera(camera).id
        mujoco.mjv_updateScene(
            model, state, self._option, None, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
        )
        mujoco.mjr_render(self._rect, self._scene, self._buffers)
        mujoco.mjr_readPixels(self._pixels, None, self._rect, self._buffers)
        return box_average(self._pixels[::-1], self._supersample)

    def close(self) -> None:
        """Free the OpenGL context. May be called again."""
        atexit.unregister(self.close)
        if self._context is not None:
            self._buffers.free()
            self._context.free()
            self._context = None


def box_average(image: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """Average squares of ``factor x factor`` pixels, rounding half up.

    Args:
        image: ``[H, W, 3]`` uint8; H and W multiples of `factor`.
        factor: Side of a square in pixels, at most 16.

    Returns:
        ``[H / factor, W / factor, 3]`` uint8, a new array.
    """
    if factor == 1:
        return image.copy()
    total = np.zeros((image.shape[0] // factor, image.shape[1] // factor, 3), np.uint16)
    for row in range(factor):
        for column in range(factor):
            total += image[row::factor, column::factor]
    return ((total + factor * factor // 2) // (factor * factor)).astype(np.uint8)
