from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from helper.core.json_records import first_error


@pytest.mark.parametrize(
    ("document", "place"), [({"a": [1, "secret"]}, "a.1"), ({"a": "secret"}, "a"), ("secret", "")], ids=repr
)
def test_first_error_names_the_place_and_quotes_no_value(document: object, place: str) -> None:
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(dict[str, list[int]]).validate_python(document)
    field, reason = first_error(raised.value)
    assert field == place
    assert reason
    assert "secret" not in reason
