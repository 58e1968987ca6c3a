"""Draw what LIBERO's cameras see.

The official environment looks at its cameras shortly before a step ends. What is seen then is noted down at
every step, which is cheap; it is drawn, which is not, only when somebody looks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.simulators.libero.loading import environment
from asyncrl.simulators.rendering import count_egl_devices, load_mujoco, open_context, require_backend

_MAX_GEOMS = 1000
"""As many as the official environment draws at most."""


class Pictures:
    """The cameras of one scene. Bound to the thread that made it.

    Args:
        model: A ``mujoco.MjModel``. Its sizes and quality of pictures are set here.
        state: Its ``mujoco.MjData``.
        cameras: Names of K cameras of the model.
        size: Side of the pictures in pixels.
        multisampling: Whether edges are smoothed, as they are officially.
        reflections: Whether shiny materials mirror the scene, as they do officially.

    Raises:
        AssetError: There is no OpenGL library.
    """

    def __init__(
        self,
        model: Any,
        state: Any,
        cameras: tuple[str, ...],
        *,
        size: int,
        multisampling: bool,
        reflections: bool,
    ) -> None:
        mujoco = load_mujoco()
        self._mujoco, self._model, self._state, self._size = mujoco, model, state, size
        model.vis.global_.offwidth = max(size, model.vis.global_.offwidth)
        model.vis.global_.offheight = max(size, model.vis.global_.offheight)
        if not multisampling:
            model.vis.quality.offsamples = 0
        device = drawing_device()
        with environment(MUJOCO_EGL_DEVICE_ID=device) if device else contextlib.nullcontext():
            self._context: Any = open_context(require_backend(), size)
        self._context.make_current()
        self._buffers = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._buffers)
        self._option = mujoco.MjvOption()
        self._option.geomgroup[0] = 0  # Shapes for collisions
        self._option.geomgroup[1] = 1  # Shapes to be seen
        self._views = [self._view(name, reflections) for name in cameras]
        atexit.register(self.close)

    def _view(self, name: str, reflections: bool) -> tuple[Any, Any]:
        """Return the camera, and the list of what it sees."""
        mujoco = self._mujoco
        camera = mujoco.MjvCamera()
        camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        camera.fixedcamid = self._model.camera(name).id
        scene = mujoco.MjvScene(self._model, maxgeom=_MAX_GEOMS)
        if not reflections:
            scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        return camera, scene

    def note(self) -> None:
        """Note down what the cameras see of the present state."""
        everything = self._mujoco.mjtCatBit.mjCAT_ALL
        for camera, scene in self._views:
            self._mujoco.mjv_updateScene(
                self._model, self._state, self._option, None, camera, everything, scene
            )

    def draw(self) -> NDArray[np.uint8]:
        """Draw what was noted down last.

        Returns:
            ``[K, size, size, 3]`` uint8, a new array. Both axes of what OpenGL gives are reversed, as
            published policies are given them: upright, and a mirror image.
        """
        self._context.make_current()
        area = self._mujoco.MjrRect(0, 0, self._size, self._size)
        images = np.empty((len(self._views), self._size, self._size, 3), np.uint8)
        for image, (_, scene) in zip(images, self._views, strict=True):
            self._mujoco.mjr_render(area, scene, self._buffers)
            self._mujoco.mjr_readPixels(image, None, area, self._buffers)
        return images[:, ::-1, ::-1].copy()

    def close(self) -> None:
        """Free the OpenGL context. May be called again."""
        atexit.unregister(self.close)
        if self._context is not None:
            self._context.make_current()
            self._buffers.free()
            self._context.free()
            self._context = None


def drawing_device() -> str:
    """Return which EGL device draws, by its number: the first that CUDA may use. Empty: EGL's first."""
    if require_backend() != "egl" or os.environ.get("MUJOCO_EGL_DEVICE_ID"):
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    first = visible.split(",")[0].strip()
    if first == "-1":  # As CUDA reads it: none.
        return ""
    if visible and not first.isdecimal():
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES is {visible!r}, which does not tell what device LIBERO shall draw with: "
            "EGL numbers them. Set MUJOCO_EGL_DEVICE_ID to the number (0 where there is one)."
        )
    return first if first and int(first) < count_egl_devices() else ""
