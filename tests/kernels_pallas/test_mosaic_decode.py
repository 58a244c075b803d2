from mosaic_scenes import error_without_races, interpret


def test_decodes_of_one_and_several_splits_and_tiles():
    assert error_without_races("decodes") < 1e-2


def test_a_race_would_be_found():
    answer = interpret("a_store_before_its_data")
    assert "RACE DETECTED" in answer.stdout + answer.stderr
