from mosaic_scenes import error_without_races


def test_prompts_and_chunks_among_decodes():
    assert error_without_races("mixed") < 1e-2
