from mosaic_scenes import error_without_races


def test_prompts_and_chunks_among_decodes():
    assert error_without_races("mixed") < 1e-2


def test_chunks_whose_window_begins_among_them_and_decodes_of_splits_before_it():
    assert error_without_races("window_and_soft_cap") < 1e-2
