"""Profiles: values of the cost model's parameters after a fit, with covariance and provenance.

`shipped.json` beside this file is the profile that orch comes with; `orch calibrate --table` writes
such a file. A site profile has the same form and holds only what its own measurements made of
another one. Predictions take their error from it: the parameters' covariance, what differs between
tables measured by different people, and noise within a table.
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

if TYPE_CHECKING:  # imported where it is used: a plan that is read from the cache needs no numpy
    from numpy.typing import NDArray

    from .numpy_import import np

SCHEMA = "orch.profile/1"
SHIPPED_FILE = Path(__file__).with_name("shipped.json")
NOISE = 0.06  # standard deviation of ln t within a table (accuracy.md section 4)
#: Standard deviation of a parameter between tables: what a machine or a release differs by. By the
#: longest prefix.
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
    name: str
    value: float
    prior: float
    sd: float  # of the logarithm, after the fit
    unit: str
    source: str


class LeftOut(Frozen):
    """Mean absolute error of a source's step times: before the fit, in it, and when the source is
    left out of it."""

    source: str
    rows: int
    prior: float
    fitted: float
    left_out: float


class FittedOn(Frozen):
    """Where the values come from."""

    what: str  # "table", "run", "bench", "prior"
    sha256: str = ""  # of the table
    date: str = ""
    rows: dict[str, int] = {}  # by source
    #: label of the profile that was updated; of the first one, where several updates followed
    base: str = ""
    runs: list[
        str
    ] = []  # ids of the runs, and "bench <when>", whose measurements it was updated with, in order


class Profile(Frozen, dict=True):
    schema: str
    name: str
    fitted_on: FittedOn
    parameters: list[FittedParameter]
    covariance: list[list[float]]  # of the logarithms, lower triangle, in the order of `parameters`
    left_out: list[LeftOut] = []

    @cached_property
    def values(self) -> dict[str, float]:
        """By name, in the order of `NAMES`; parameters that the file does not know have their
        prior."""
        shipped_values = {parameter.name: parameter.value for parameter in self.parameters}
        return {name: shipped_values.get(name, value) for name, value in PRIOR_VALUES.items()}

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    @property
    def label(self) -> str:
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
        """Variances between tables; nothing for a site's own profile, whose machines are those that
        run."""
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
    return BETWEEN[max((stem for stem in BETWEEN if name.startswith(stem)), key=len)]


def relative_sd(jacobian: NDArray[np.float64], profile: Profile) -> float:
    """Standard deviation of ln t. jacobian: d ln t / d ln(parameter), float [len(NAMES)]."""
    # in six digits, and without BLAS, whose sums depend on the number of threads: plans are hashed
    # with it
    variance = float((jacobian[:, None] * profile.uncertainty * jacobian).sum()) + NOISE**2
    return _digits(variance**0.5, 6)


def make_profile(
    name: str,
    values: Mapping[str, float],
    covariance: NDArray[np.float64],
    fitted_on: FittedOn,
    left_out: Any = (),
) -> Profile:
    """A profile in the form of its file: values rounded to six digits, covariances to four."""
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
    return float(f"{value:.{digits}g}")


def prior_profile() -> Profile:
    """What is believed before any run was seen."""
    from .numpy_import import np

    return make_profile(
        "prior",
        PRIOR_VALUES,
        np.diag([parameter.sd**2 for parameter in PRIOR]),
        FittedOn(what="prior"),
    )


def read_profile(path: Path) -> Profile:
    """Raises OrchError (65) for a file that is not a profile."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise OrchError(f"profile {path}: {error.strerror}", Exit.CONFIG) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise OrchError(
            f"profile {path}: {error}; orch calibrate writes one", Exit.CONFIG
        ) from None
    problem = _problem(profile)
    if problem:
        raise OrchError(f"profile {path}: {problem}", Exit.CONFIG)
    return profile


def _problem(profile: Profile) -> str | None:
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
    """The profile that orch comes with."""
    return read_profile(SHIPPED_FILE) if SHIPPED_FILE.exists() else prior_profile()


def differing(profile: Profile) -> dict[str, float]:
    """Values that are not those of the shipped profile: what a plan carries of a site's own."""
    usual = shipped().values
    return {name: value for name, value in profile.values.items() if value != usual[name]}


def with_values(values: Mapping[str, float]) -> Profile:
    """The shipped profile with some values of a site's: what a plan was made with, by what it
    carries."""
    if not values:
        return shipped()
    parameters = [
        structs.replace(parameter, value=values.get(parameter.name, parameter.value))
        for parameter in shipped().parameters
    ]
    triangle = list(shipped().covariance)
    names = {parameter.name for parameter in parameters}
    for parameter in PRIOR:  # those that the shipped file does not know yet
        if parameter.name in values and parameter.name not in names:
            prior_fields = {
                name: getattr(parameter, name) for name in ("name", "sd", "unit", "source")
            }
            parameters.append(
                FittedParameter(**prior_fields, value=values[parameter.name], prior=parameter.value)
            )
            triangle.append([0.0] * len(triangle) + [parameter.sd**2])
    return structs.replace(shipped(), parameters=parameters, covariance=triangle)
