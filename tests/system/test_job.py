"""How an error is told in one line."""

from autofit.system.job import error_words


def test_the_cause_of_a_data_set_that_cant_be_made_is_told():
    from datasets.exceptions import DatasetGenerationError

    told = DatasetGenerationError("An error occurred while generating the dataset")
    told.__cause__ = ValueError("line 7 is broken\nand more")
    assert error_words(told).endswith("while generating the dataset, from ValueError: line 7 is broken")


def test_the_cause_of_another_error_is_not():
    told = OSError("no such model")
    told.__cause__ = ValueError("a request failed")
    assert error_words(told) == "OSError: no such model"
