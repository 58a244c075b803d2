from mosaic_scenes import error_without_races


def test_prompts_and_chunks_among_decodes():
    assert error_without_races("mixed") < 1e-2


def test_chunks_whose_window_ends_among_them():
    assert error_without_races("window") < 1e-2
