"""Profiles: values of the cost model's parameters after a fit, with covariance and provenance.

`shipped.json` next to this file is the profile that orch comes with; `orch calibrate --table`
writes such a file. A site profile has the same form. It holds the values of another profile,
updated only by the site's own measurements. Predictions take their error from a profile: the
parameters' covariance, the differences between tables that different people measured, and the noise
within a table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property, lru_cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from orchestrator.errors import OrchError
from orchestrator.plan.document import Frozen
from orchestrator.plan.exits import Exit

from .parameters import INDEX, NAMES, PRIOR, PRIOR_VALUES

if TYPE_CHECKING:  # Imported where it is used: a plan that is read from the cache needs no numpy.
    from numpy.typing import NDArray

    from .numpy_import import np

SCHEMA = "orch.profile/1"
SHIPPED_FILE = Path(__file__).with_name("shipped.json")
NOISE = 0.06  # standard deviation of ln t within a table (accuracy.md section 4)
#: Standard deviation of a parameter between tables, which reflects different machines and releases.
#: The longest matching prefix counts.
BETWEEN: dict[str, float] = {
    "": 0.3,
    **dict.fromkeys(("gemm", "family"), 0.06),
    **dict.fromkeys(("gemm.hopper.fp8", "gemm.blackwell.fp8", "gemm.blackwell_ultra.fp8"), 0.08),
    **dict.fromkeys(("gemm.blackwell.nvfp4", "gemm.blackwell_ultra.nvfp4", "head"), 0.1),
    **dict.fromkeys(("family.eager", "family.orch", "family.transformers", "nvlink"), 0.15),
    **dict.fromkeys(
        (
            "gemm_bytes",
            "gemm_wave",
            "gemm.other",
            "attention",
            "elementwise",
            "accumulate",
            "logits",
        ),
        0.2,
    ),
    **dict.fromkeys(("optimizer", "nic"), 0.2),
    **dict.fromkeys(("moe", "host", "pp", "ep", "dp", "nodes"), 0.4),
    **dict.fromkeys(("latency", "link", "attention.cpu"), 0.5),
    "hbm": 0.05,
    "hbm.cpu": 0.3,
    "gemm.cpu": 0.3,
}


class FittedParameter(Frozen):
    """A parameter of a profile."""

    name: str
    value: float
    prior: float
    sd: float  # standard deviation of the logarithm, after the fit
    unit: str
    source: str


class LeftOut(Frozen):
    """The mean absolute error of a source's step times.

    It is given before the fit, in the fit, and when the source is left out of the fit.
    """

    source: str
    rows: int
    prior: float
    fitted: float
    left_out: float


class FittedOn(Frozen):
    """The provenance of a profile's values."""

    what: str  # "table", "run", "bench", "prior"
    sha256: str = ""  # hash of the table
    date: str = ""
    rows: dict[str, int] = {}  # rows by source
    #: The label of the profile that was updated; after several updates, of the first one.
    base: str = ""
    #: Ids of the runs, "bench <when>" and "row <name> <plan> <seconds>", whose measurements updated
    #: the profile, in order.
    runs: list[str] = []


class Profile(Frozen, dict=True):
    """Values, covariance and provenance of the parameters."""

    schema: str
    name: str
    fitted_on: FittedOn
    parameters: list[FittedParameter]
    # covariance of the logarithms: lower triangle, in the order of `parameters`
    covariance: list[list[float]]
    left_out: list[LeftOut] = []

    @cached_property
    def values(self) -> dict[str, float]:
        """Values by name, in the order of `NAMES`.

        Parameters that the file does not know have the value of their prior.
        """
        shipped_values = {parameter.name: parameter.value for parameter in self.parameters}
        return {name: shipped_values.get(name, value) for name, value in PRIOR_VALUES.items()}

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the profile."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    @property
    def label(self) -> str:
        """The name of the profile with the beginning of its digest."""
        return f"{self.name} {self.digest[:8]}"

    @cached_property
    def posterior(self) -> NDArray[np.float64]:
        """Covariance of the logarithms of `NAMES`."""
        from .numpy_import import np

        covariance = np.diag([parameter.sd**2 for parameter in PRIOR])
        fitted = [INDEX[parameter.name] for parameter in self.parameters if parameter.name in INDEX]
        rows = [index for index, parameter in enumerate(self.parameters) if parameter.name in INDEX]
        full = np.zeros((len(self.parameters), len(self.parameters)))
        for index, row in enumerate(self.covariance):
            full[index, : index + 1] = row
        full += np.tril(full, -1).T
        covariance[np.ix_(fitted, fitted)] = full[np.ix_(rows, rows)]
        return covariance

    @cached_property
    def between(self) -> NDArray[np.float64]:
        """Variances between tables.

        They are 0 for a site's own profile, whose machines are those of the job.
        """
        from .numpy_import import np

        if self.fitted_on.base:
            return np.zeros(len(NAMES))
        return np.array([between_sd(name) ** 2 for name in NAMES])

    @cached_property
    def uncertainty(self) -> NDArray[np.float64]:
        """Covariance of the parameters for a job on machines that were not in the fit."""
        from .numpy_import import np

        return self.posterior + np.diag(self.between)


def between_sd(name: str) -> float:
    """Returns the standard deviation of a parameter between tables."""
    return BETWEEN[max((stem for stem in BETWEEN if name.startswith(stem)), key=len)]


def relative_sd(jacobian: NDArray[np.float64], profile: Profile) -> float:
    """Returns the standard deviation of ln t.

    `jacobian` is d ln t / d ln(parameter), float [len(NAMES)].
    """
    # Rounded to six digits and computed without BLAS, whose sums depend on the number of threads,
    # because plans are hashed with this number.
    variance = float((jacobian[:, None] * profile.uncertainty * jacobian).sum()) + NOISE**2
    return _digits(variance**0.5, 6)


def make_profile(
    name: str,
    values: Mapping[str, float],
    covariance: NDArray[np.float64],
    fitted_on: FittedOn,
    left_out: Any = (),
) -> Profile:
    """Returns a profile in the form of its file: values with six digits, covariances with four."""
    from .numpy_import import np

    parameters = [
        FittedParameter(
            name=parameter.name,
            value=_digits(values[parameter.name], 6),
            prior=parameter.value,
            sd=_digits(float(np.sqrt(covariance[index, index])), 4),
            unit=parameter.unit,
            source=parameter.source,
        )
        for index, parameter in enumerate(PRIOR)
    ]
    triangle = [
        [_digits(float(x), 4) if abs(x) > 1e-7 else 0.0 for x in covariance[index, : index + 1]]
        for index in range(len(PRIOR))
    ]
    return Profile(
        schema=SCHEMA,
        name=name,
        fitted_on=fitted_on,
        parameters=parameters,
        covariance=triangle,
        left_out=list(left_out),
    )


def _digits(value: float, digits: int) -> float:
    """Rounds a number to this many significant digits."""
    return float(f"{value:.{digits}g}")


def prior_profile() -> Profile:
    """Returns the profile of the beliefs before any run was seen."""
    from .numpy_import import np

    return make_profile(
        "prior",
        PRIOR_VALUES,
        np.diag([parameter.sd**2 for parameter in PRIOR]),
        FittedOn(what="prior"),
    )


def read_profile(path: Path) -> Profile:
    """Reads a profile. Raises OrchError (65) for a file that is not a profile."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OrchError(f"profile {path}: {error.strerror}", Exit.CONFIG) from None
    return decode_profile(content, path)


def decode_profile(content: bytes, path: Path) -> Profile:
    """Decodes the content of a profile's file. Raises OrchError (65) if it is not a profile."""
    try:
        profile = msgspec.json.decode(content, type=Profile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise OrchError(
            f"profile {path}: {error}; orch calibrate writes one", Exit.CONFIG
        ) from None
    problem = _problem(profile)
    if problem:
        raise OrchError(f"profile {path}: {problem}", Exit.CONFIG)
    return profile


def _problem(profile: Profile) -> str | None:
    """Returns the reason why a profile is invalid, or None."""
    if profile.schema != SCHEMA:
        return f"schema is {profile.schema!r}, this version reads {SCHEMA!r}"
    for parameter in profile.parameters:
        if not (0 < parameter.value < 1e12):
            return f"parameter {parameter.name} is {parameter.value}, must be positive"
    if [len(row) for row in profile.covariance] != list(range(1, len(profile.parameters) + 1)):
        return f"covariance is not the lower triangle of {len(profile.parameters)} parameters"
    for row, parameter in zip(profile.covariance, profile.parameters, strict=True):
        if not (row[-1] > 0 and all(map(isfinite, row))):
            return f"covariance of {parameter.name} is not finite, or its variance not positive"
    return None


@lru_cache(maxsize=1)
def shipped() -> Profile:
    """Returns the profile that orch comes with."""
    return read_profile(SHIPPED_FILE) if SHIPPED_FILE.exists() else prior_profile()


def differing(profile: Profile) -> dict[str, float]:
    """Returns a site's values that differ from the shipped profile; its plans store them."""
    usual = shipped().values
    return {name: value for name, value in profile.values.items() if value != usual[name]}


def with_values(values: Mapping[str, float]) -> Profile:
    """Returns the shipped profile with some values of a site's own.

    A plan stores these values, so this is the profile with which it was made.
    """
    if not values:
        return shipped()
    parameters = [
        structs.replace(parameter, value=values.get(parameter.name, parameter.value))
        for parameter in shipped().parameters
    ]
    triangle = list(shipped().covariance)
    names = {parameter.name for parameter in parameters}
    for parameter in PRIOR:  # Parameters that the shipped file does not know yet.
        if parameter.name in values and parameter.name not in names:
            prior_fields = {
                name: getattr(parameter, name) for name in ("name", "sd", "unit", "source")
            }
            parameters.append(
                FittedParameter(
                    **prior_fields,
                    value=values[parameter.name],
                    prior=parameter.value,
                )
            )
            triangle.append([0.0] * len(triangle) + [parameter.sd**2])
    return structs.replace(shipped(), parameters=parameters, covariance=triangle)
