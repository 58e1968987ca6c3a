"""Draw pictures of a MuJoCo model with OpenGL, without a screen: ``MUJOCO_GL`` if set, else EGL, else OSMesa.

Libraries are tried with ctypes first, because mujoco's import fails with long tracebacks.
"""

import atexit
import contextlib
import ctypes
import importlib
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import AssetError

LIBRARIES: Final[dict[str, tuple[str, ...]]] = {
    "egl": ("libEGL.so.1", "libEGL.so"),
    "osmesa": ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so"),
}  # By backend, in the order in which backends are tried.

_REMEDY = (
    "Install one (Debian, Ubuntu: `apt-get install libegl1 libgl1-mesa-dri` or `libosmesa6`; conda: "
    "`conda install -c conda-forge mesalib`), or set MUJOCO_GL to egl, osmesa or glfw."
)


def find_backend() -> str | None:
    """Return the name of the OpenGL backend, or None without one. Imports no mujoco."""
    wanted = os.environ.get("MUJOCO_GL", "").lower().strip()
    if wanted in ("disable", "disabled", "off", "false", "0"):
        return None
    if wanted in LIBRARIES:
        return wanted if _usable(wanted) else None
    if wanted not in ("", "enable", "enabled", "on", "true", "1"):
        return wanted
    if platform.system() != "Linux":
        return "cgl" if platform.system() == "Darwin" else "wgl"
    return next((backend for backend in LIBRARIES if _usable(backend)), None)


def require_backend() -> str:
    """Return the name of the OpenGL backend; an AssetError if there is none."""
    if backend := find_backend():
        return backend
    wanted = os.environ.get("MUJOCO_GL", "")
    seen = f"MUJOCO_GL is {wanted!r}, with which nothing is drawn" if wanted else "No EGL or OSMesa works"
    raise AssetError(f"{seen} here, and the simulator needs OpenGL. {_REMEDY}")


def load_mujoco() -> Any:
    """Import mujoco, also without OpenGL: its import fails when ``MUJOCO_GL`` names a missing library."""
    if "mujoco" in sys.modules:
        return sys.modules["mujoco"]
    with environment(MUJOCO_GL=find_backend() or "disable"):
        return importlib.import_module("mujoco")


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Set environment variables within the context; None unsets one."""
    before = {name: os.environ.pop(name, None) for name in values}
    os.environ.update({name: value for name, value in values.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})


def _usable(backend: str) -> bool:
    return count_egl_devices() > 0 if backend == "egl" else _load(backend) is not None


def _load(backend: str) -> ctypes.CDLL | None:
    for name in LIBRARIES[backend]:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    return None


def count_egl_devices() -> int:
    """Count the devices of EGL; 0 without EGL."""
    library = _load("egl")
    if library is None or not hasattr(library, "eglGetProcAddress"):
        return 0
    library.eglGetProcAddress.restype = ctypes.c_void_p
    library.eglGetProcAddress.argtypes = [ctypes.c_char_p]
    address = library.eglGetProcAddress(b"eglQueryDevicesEXT")
    if not address:
        return 0
    kind = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
    count = ctypes.c_int(0)
    return count.value if kind(address)(0, None, ctypes.byref(count)) else 0


def open_context(backend: str, size: int) -> Any:
    """Create an off-screen context, whatever ``MUJOCO_GL`` was at the import of mujoco."""
    try:
        module = backend if backend in ("egl", "osmesa", "cgl") else "glfw"
        return importlib.import_module(f"mujoco.{module}").GLContext(size, size)
    except (ImportError, RuntimeError, AttributeError) as error:
        raise AssetError(f"The OpenGL backend {backend!r} did not start: {error}. {_REMEDY}") from error


class Renderer:
    """Draws cameras of a MuJoCo model into square pictures. Bound to the thread that made it.

    `note` keeps the cameras' view of a state, which is cheap; `draw` renders it. Pictures are drawn
    `supersample` times larger and averaged down: a cube is 7 pixels wide at 64 x 64, so soft edges carry
    position information that hard edges lose.

    Args:
        model: A ``mujoco.MjModel`` whose off-screen buffer is at least ``size * supersample`` wide. Other
            models compiled from the same text may be drawn too.
        cameras: Names of K cameras of the model.
        without: Flags of ``mujoco.mjtRndFlag`` to turn off, as ``SHADOW``.
    """

    def __init__(
        self,
        model: Any,
        cameras: Sequence[str],
        *,
        size: int,
        supersample: int = 1,
        most_shapes: int,
        without: Sequence[str] = (),
    ) -> None:
        mujoco = load_mujoco()
        side = size * supersample
        self._mujoco, self._supersample = mujoco, supersample
        self._context: Any = open_context(require_backend(), side)
        self._context.make_current()
        self._buffers = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._buffers)
        self.option = mujoco.MjvOption()  # Kinds of shapes that are drawn.
        self._views: list[tuple[Any, Any]] = []
        for name in cameras:
            camera, scene = mujoco.MjvCamera(), mujoco.MjvScene(model, maxgeom=most_shapes)
            camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, model.camera(name).id
            for flag in without:
                scene.flags[getattr(mujoco.mjtRndFlag, f"mjRND_{flag}")] = 0
            self._views.append((camera, scene))
        self._rect = mujoco.MjrRect(0, 0, side, side)
        self._pixels = np.empty((side, side, 3), np.uint8)
        atexit.register(self.close)

    def note(self, model: Any, state: Any) -> None:
        """Keep the view of a ``mujoco.MjData`` of a model, whose colours may have changed."""
        for camera, scene in self._views:
            self._mujoco.mjv_updateScene(
                model, state, self.option, None, camera, self._mujoco.mjtCatBit.mjCAT_ALL, scene
            )

    def draw(self) -> NDArray[np.uint8]:
        """Draw the view that was kept last: ``[K, size, size, 3]``, a new array, first row on top."""
        self._context.make_current()
        pictures = []
        for _, scene in self._views:
            self._mujoco.mjr_render(self._rect, scene, self._buffers)
            self._mujoco.mjr_readPixels(self._pixels, None, self._rect, self._buffers)
            pictures.append(box_average(self._pixels[::-1], self._supersample))
        return np.stack(pictures)

    def close(self) -> None:
        """Free the OpenGL context. May be called again."""
        atexit.unregister(self.close)
        if self._context is not None:
            self._context.make_current()
            self._buffers.free()
            self._context.free()
            self._context = None


def box_average(image: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """Average squares of ``factor x factor`` pixels of ``[H, W, 3]``, rounding half up, into a new array."""
    if factor == 1:
        return image.copy()
    total = np.zeros((image.shape[0] // factor, image.shape[1] // factor, 3), np.uint16)
    for row in range(factor):
        for column in range(factor):
            total += image[row::factor, column::factor]
    return ((total + factor * factor // 2) // (factor * factor)).astype(np.uint8)
