"""The JSON schemas of pydantic's models: all are served, and what the compiler lets through is a value of the model."""

from collections.abc import Iterator
import dataclasses
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import random
from typing import Annotated, Any, Generic, Literal, NamedTuple, Optional, TypedDict, TypeVar, Union
import uuid

import jsonschema
import llguidance
from pydantic import (
  AnyUrl,
  Base64Str,
  BaseModel,
  ConfigDict,
  Discriminator,
  Field,
  HttpUrl,
  Json,
  NegativeInt,
  PositiveFloat,
  RootModel,
  SecretStr,
  StringConstraints,
  Tag,
  TypeAdapter,
  conint,
  conlist,
  constr,
)
import pytest

from engine.errors import InvalidRequest
from server.proto import sluice_pb2 as pb
from server.text.constraint_compiler import ConstraintCompiler, prepare_schema_text

BYTES = llguidance.LLTokenizer("byte")
CLOSERS = b'"}],'


class Color(enum.Enum):
  RED = "red"
  BLUE = "blue"


class Level(enum.IntEnum):
  LOW = 1
  HIGH = 2


class Address(BaseModel):
  """Where somebody lives."""

  street: str
  city: str | None = None


class Person(BaseModel):
  name: str = Field(min_length=1, max_length=20, description="The full name.", examples=["Mira"])
  age: int = Field(ge=0, le=150)
  address: Address
  others: list[Address] = []


class Employee(Person):
  """A person with more."""

  badge: int


class Node(BaseModel):
  value: int
  children: list["Node"] = []


class Linked(BaseModel):
  value: bool
  next: Optional["Linked"] = None


class Cat(BaseModel):
  kind: Literal["cat"]
  lives: int


class Dog(BaseModel):
  kind: Literal["dog"]
  tricks: list[str]


class CatByDefault(BaseModel):
  kind: Literal["cat"] = "cat"
  lives: int = 9


class DogByDefault(BaseModel):
  kind: Literal["dog", "puppy"] = "dog"


class Leaf(BaseModel):
  type: Literal["leaf"] = "leaf"
  value: int


class Branch(BaseModel):
  type: Literal["branch"] = "branch"
  left: "Tree"
  right: "Tree"


Tree = Annotated[Leaf | Branch, Field(discriminator="type")]


class Forbidding(BaseModel):
  model_config = ConfigDict(extra="forbid")
  a: int


class Allowing(BaseModel):
  model_config = ConfigDict(extra="allow")
  a: int


class Aliased(BaseModel):
  inner: int = Field(alias="theOuter", title="Outer", deprecated=True)


T = TypeVar("T")


class Page(BaseModel, Generic[T]):  # noqa: UP046 (older code writes it so)
  items: list[T]
  total: int


class Point(NamedTuple):
  x: int
  y: int = 0


class Movie(TypedDict, total=False):
  title: str
  year: int


@dataclasses.dataclass
class Pair:
  left: int
  right: list[int] = dataclasses.field(default_factory=list)


def kind_of(value: Any) -> str:
  return "number" if isinstance(value, int) else "text"


# Each is the type of one field, or a model itself.
TYPES: dict[str, Any] = {
  "text": str,
  "whole": int,
  "number": float,
  "truth": bool,
  "nothing": None,
  "anything": Any,
  "optional": str | None,
  "optional whole": Optional[int],  # noqa: UP045
  "union": int | str | None,
  "union of lists": list[int] | dict[str, int],
  "literal": Literal["a", "b", 3, None, True],
  "one literal": Literal["only"],
  "enum": Color,
  "enum of numbers": Level,
  "list": list[int],
  "list of lists": list[list[str]],
  "set": set[int],
  "frozen set of an enum": frozenset[Color],
  "tuple": tuple[int, str],
  "tuple of any length": tuple[int, ...],
  "empty tuple": tuple[()],
  "named tuple": Point,
  "map": dict[str, int],
  "map of models": dict[str, Address],
  "map by enum": dict[Color, int],
  "map by literal": dict[Literal["x", "y"], str],
  "map by pattern": dict[constr(pattern="^[a-z]{1,3}$"), int],
  "map by number": dict[int, str],
  "map by date": dict[datetime.date, int],
  "map of a length": Annotated[dict[str, int], Field(min_length=1, max_length=2)],
  "typed map": Movie,
  "data class": Pair,
  "bounded": conint(ge=1, lt=10),
  "bounded number": Annotated[float, Field(gt=0, le=1)],
  "multiple": conint(multiple_of=5, ge=0, le=100),
  "decimal multiple": Annotated[float, Field(multiple_of=0.5, ge=0, le=10)],
  "positive": PositiveFloat,
  "negative": NegativeInt,
  "int64": conint(ge=-(2**63), le=2**63 - 1),
  "uint64": conint(ge=0, le=2**64 - 1),
  "long text": constr(min_length=2, max_length=5),
  "pattern": constr(pattern=r"^\d{3}-[A-Z]+$"),
  "lookahead": Annotated[str, StringConstraints(pattern=None), Field(json_schema_extra={"pattern": "^(?=a)a"})],
  "bounded list": conlist(int, min_length=1, max_length=3),
  "moment": datetime.datetime,
  "time": datetime.time,
  "duration": datetime.timedelta,
  "uuid": uuid.UUID,
  "decimal": decimal.Decimal,
  "bounded decimal": Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)],
  "bytes": bytes,
  "base64": Base64Str,
  "path": pathlib.PurePosixPath,
  "secret": SecretStr,
  "json": Json[Any],
  "url": AnyUrl,
  "http url": HttpUrl,
  "ipv4": ipaddress.IPv4Address,
  "ipv6 network": ipaddress.IPv6Network,
  "address": Address,
  "person": Person,
  "employee": Employee,
  "tree of nodes": Node,
  "linked": Linked,
  "animals": Annotated[Cat | Dog, Field(discriminator="kind")],
  "animals by default": Annotated[CatByDefault | DogByDefault, Field(discriminator="kind")],
  "animals without a discriminator": Cat | Dog,
  "list of animals": list[Annotated[Cat | Dog, Field(discriminator="kind")]],
  "animals and nothing": Annotated[Cat | Dog, Field(discriminator="kind")] | None,
  "syntax tree": Tree,
  "by a function": Annotated[Annotated[int, Tag("number")] | Annotated[str, Tag("text")], Discriminator(kind_of)],
  "forbidding": Forbidding,
  "allowing": Allowing,
  "aliased": Aliased,
  "page": Page[Person],
  "page of pages": Page[Page[int]],
  "root": RootModel[list[Address]],
  "union in a map": dict[str, Union[int, list[Color]]],  # noqa: UP007
}
# Keywords of theirs that are ignored, with the name in a header.
IGNORED = {"set": "uniqueItems", "lookahead": "pattern"}
IGNORED["map by date"] = "propertyNames"
# Pydantic is narrower than its schema: February 29, years of more digits, durations, and what only its types say.
LOOSER = {"map by date", "map by number", "moment", "time", "duration", "path", "base64", "json", "ipv6 network"}
LOOSER |= {"int64", "url", "http url", "decimal", "bounded decimal", "uuid", "set", "bytes"}


@pytest.fixture(scope="module")
def compiler(tokenizer):
  return ConstraintCompiler(tokenizer, 400, (2,))


def sample(source: str, chance: random.Random) -> str | None:
  """An output of random bytes; None if it does not end."""
  matcher, out = llguidance.LLMatcher(BYTES, source, log_level=0), bytearray()
  while len(out) < 4000:
    mask = matcher.compute_bitmask()
    if matcher.is_stopped() or (matcher.is_accepting() and chance.random() < 0.7):
      return out.decode()
    allowed = [byte for byte in range(32, 127) if mask[byte // 8] >> byte % 8 & 1]
    if not allowed:
      return out.decode()
    closing = [byte for byte in allowed if byte in CLOSERS[:3]] or [byte for byte in allowed if byte in CLOSERS]
    byte = chance.choice(closing if closing and chance.random() < 0.6 else allowed)
    assert matcher.consume_token(byte)
    out.append(byte)
  return None


def samples(source: str, count: int) -> Iterator[Any]:
  chance = random.Random(1)
  for _ in range(count):
    text = sample(source, chance)
    if text is not None:
      yield json.loads(text)


@pytest.mark.parametrize("name", TYPES)
def test_a_model_is_served_and_its_outputs_are_values_of_it(compiler, name):
  adapter = TypeAdapter(TYPES[name])
  schema = adapter.json_schema()
  assert len(TYPES) >= 60
  text, unenforced = prepare_schema_text(json.dumps(schema), closes=True)
  assert [keyword.keyword for keyword in unenforced] == ([IGNORED[name]] if name in IGNORED else [])
  source = compiler.compile(pb.OutputConstraint(json_schema=text)).source
  values = list(samples(source, 12))
  assert values
  if name not in IGNORED:
    for value in values:
      jsonschema.validate(value, schema)
      if name not in LOOSER:
        adapter.validate_json(json.dumps(value))
  else:
    with pytest.raises(InvalidRequest, match=IGNORED[name]):
      compiler.compile(pb.OutputConstraint(json_schema=json.dumps(schema)))


def test_openai_s_strict_schemas_are_served(compiler):
  from openai.lib._pydantic import to_strict_json_schema

  for model in (Person, Employee, Node, Linked, Page[Person]):
    text = json.dumps(to_strict_json_schema(model))
    assert not prepare_schema_text(text, closes=True)[1]
    assert list(samples(compiler.compile(pb.OutputConstraint(json_schema=text)).source, 2))
