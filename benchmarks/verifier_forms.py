r"""How many right answers the verifier accepts in the phrasings of models, and how many wrong ones.

    python benchmarks/verifier_forms.py --data ../shared/data            # figures of docs/verification.md; a minute
    python benchmarks/verifier_forms.py --data ../shared/data --show 20  # and the first rows that went wrong

Right: gold answers of benchmarks, put into phrasings: English and Chinese, plain, LaTeX and Markdown, with units, as
lists, as choices. Wrong: other values in the same phrasings. They are made of the gold answer by one change (a digit,
the sign, one item of a list, a factor of a thousand, another letter), or are another problem's gold answer.
The folder holds gsm8k/, math/, math500/, amc23/ and minerva_math/ with test.jsonl in each.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from regretless.data.columns import Verdict
from regretless.labeling.grading.extraction import answer_in_gold
from regretless.labeling.grading.grader import grade

SOURCES = {"gsm8k": "answer", "math": "solution", "math500": "answer", "amc23": "answer", "minerva_math": "solution"}
KINDS = {"number": 130, "expression": 90, "group": 40, "list": 50, "choice": 25, "words": 15}
"""Gold answers drawn of each kind."""

# {v}: the value as LaTeX or a plain number; {p}: the same in dollars signs where it is LaTeX.
EVERYWHERE = [
    r"So it is \boxed{{{v}}}.",
    r"$\boxed{{{v}}}$",
    "$$\n\\boxed{{{v}}}\n$$",
    "\\[\n\\boxed{{{v}}}\n\\]",
    r"The answer is $\boxed{{ {v} }}$.",
    r"Therefore, the final answer is: $\boxed{{{v}}}$. I hope it is correct.",
    r"\fbox{{{v}}}",
    r"\boxed{{\displaystyle {v}}}",
    r"\boxed{{{v}.}}",
    r"因此，答案是\boxed{{{v}}}。",
    r"<answer>\boxed{{{v}}}</answer>",
    "The answer is {p}.",
    "The answer is {v}.",
    "So we get {v}.",
    "The answer is: {p}",
    "The answer is:\n{p}",
    "The answer is:\n\n{p}\n",
    "The answer is:\n\n$${v}$$",
    "The answer is\n\\[{v}\\]",
    "The answer is:\n\\[\n{v}\n\\]\nThis completes the solution.",
    "The answer is **{p}**.",
    "The answer is:\n\n**{p}**",
    "Answer: {p}",
    "ANSWER: {p}",
    "answer: {p}",
    "Ans: {p}",
    "**Answer:** {p}",
    "**Answer: {p}**",
    "**Answer**: {p}",
    "**Answer**\n\n{p}",
    "Answer:\n{p}",
    "Final answer: {p}",
    "**Final Answer:** {p}",
    "**Final Answer**\n\n$${v}$$",
    "### Final Answer\n\n{p}",
    "## Answer\n\\[{v}\\]",
    "Final Answer: The final answer is {p}. I hope it is correct.",
    "Final Answer: The final answer is ${v}$. I hope it is correct.",
    "The final answer is ${v}$. I hope it is correct.",
    "The final answer is {p}.\n\nI hope this answer is correct.",
    "Therefore, the answer is {p}.",
    "So the answer is {p}!",
    "Hence the correct answer is {p}.",
    "Thus the final answer is \\({v}\\).",
    "My answer is {p}.",
    "The answer to the question is {p}.",
    "The answer to this problem is therefore {p}.",
    "The answer should be {p}.",
    "The answer would be {p}.",
    "The answer must be {p}",
    "Answer = {p}",
    "The answer is {p}, as shown above.",
    "The answer is {p}, since 2 + 2 = 4.",
    "The answer is {p} because we counted twice.",
    "The answer is {p}.\n\nCheck: 2 + 2 = 4, which agrees.",
    "First guess: the answer is 77777. No, that was wrong. The answer is {p}.",
    "#### {p}",
    "Step 1: 2 + 2 = 4.\n#### {p}",
    "<answer>{p}</answer>",
    "<answer>\n{p}\n</answer>",
    "The result is {p}.",
    "Result: {p}",
    "Solution: {p}",
    "答案是{p}",
    "答案是 {p}。",
    "答案：{p}",
    "答案: {p}",
    "答案：\n{p}",
    "所以答案为{p}。",
    "因此，答案是 ${v}$。",
    "最终答案：{p}",
    "【答案】{p}",
    "综上所述，答案等于{p}。",
    "故答案为：{p}",
    "因此结果是{p}。",
    "答：{p}。",
]
NUMBERS = [
    "Adding both, she needs {v} apples.",
    "It takes {v} h in all.",
    "I get {v} as the answer.",
    "{v} is the answer.",
    "Therefore, {v} is the final answer.",
    "I think it's {v}.",
    "It's {v}!",
    "2 + 2 = 4, so the total is {v} dollars.",
    "Therefore, x = {v}.",
    "Thus $x = {v}$.",
    "Hence the value of $x$ is ${v}$.",
    "So she has **{v}** apples in all.",
    "Hence, there are **{v}** ways to do it in 3 steps.",
    "the answer is x = {v}",
    "The answer is about {v}.",
    "The answer is approximately {v}.",
    "The answer is {v} apples.",
    "The answer is {v} square meters.",
    "The answer is {v} cm^2.",
    "The answer is {v} cm².",
    "The answer is {v} km/h.",
    "The answer is {v} m/s.",
    "The answer is ${v}$ dollars per hour.",
    "The answer is {v} (apples).",
    "The answer is {v} more apples than before, so 3 baskets suffice.",
    "The area is ${v} \\text{{ square units}}$.",
    "The answer is {v}g.",
    "The answer is {v}km.",
    "Answer: {v} apples",
    "Answer: x = {v}",
    '{{"answer": {v}}}',
    '{{"reasoning": "2 + 2 = 4", "answer": "{v}"}}',
    "The answer is `{v}`.",
    'The answer is "{v}".',
    r"\boxed{{{v}\text{{ apples}}}}",
    r"\boxed{{{v} \text{{ cm}}^2}}",
    r"\boxed{{{v}\ \mathrm{{km/h}}}}",
    r"\boxed{{{v}\,\text{{m}}}}",
    r"\boxed{{{v}~\text{{kg}}}}",
    r"\boxed{{{v} apples}}",
    r"\boxed{{{v} (apples)}}",
    r"\boxed{{{v} \text{{ (apples)}}}}",
    r"\boxed{{x = {v}}}",
    r"\boxed{{x={v}}}",
    r"\boxed{{\text{{Area}} = {v}}}",
    r"\boxed{{${v}$}}",
    r"\boxed{{**{v}**}}",
    r"\boxed{{\mathbf{{{v}}}}}",
    r"\boxed{{\text{{{v}}}}}",
    r"\boxed{{({v})}}",
    r"\boxed{{{v}元}}",
    r"\boxed{{{v}个}}",
    r"\boxed{{{v} 平方厘米}}",
    r"\boxed{{{v}\text{{元}}}}",
    "所以一共有{v}个苹果。",
    "因此共{v}元",
    "答：一共{v}人。",
    "解得 x={v}。",
    "所以她需要{v}米。",
    "答案是**{v}**。",
    "答案是{v}元。",
    "答案是{v}（元）。",
]
UNITS = [
    "g",
    "m",
    "L",
    "h",
    "s",
    "l",
    "J",
    "N",
    "W",
    "V",
    "GB",
    "MB",
    "kg",
    "km",
    "mm",
    "ml",
    "mL",
    "Hz",
    "kHz",
    "kW",
    "Pa",
]
UNITS += ["mol", "ft", "in", "lb", "oz", "min", "hr", "mph", "dollars", "cents", "%", "degrees", "°C"]
LIST_JOINS = [", ", " and ", "; ", " or ", ",", "、", "和", ", and "]
LISTS = [
    "The answer is {l}.",
    "The answers are {l}.",
    "Answer: {l}",
    "The solutions are {l}.",
    "So the roots are {l}",
    "答案是{l}。",
    "#### {l}",
    "The answer is:\n{l}",
    "Final Answer: The final answer is {l}. I hope it is correct.",
]
CHOICES = [
    r"\boxed{{{c}}}",
    r"\boxed{{({c})}}",
    r"\boxed{{\text{{{c}}}}}",
    r"\boxed{{\text{{({c})}}}}",
    r"\boxed{{\textbf{{({c})}}}}",
    r"\boxed{{\textbf{{({c})}}\ 21}}",
    r"\boxed{{\textbf{{({c}) }} 21}}",
    r"\boxed{{\mathrm{{{c}}}}}",
    r"\boxed{{({c}) 21}}",
    r"\boxed{{\text{{Option }}{c}}}",
    "The answer is {c}.",
    "The answer is ({c}).",
    "The answer is **{c}**.",
    "The answer is {c}) 21",
    "The answer is ({c}) 21.",
    "The answer is {c}. 21",
    "The answer is $\\textbf{{({c})}}\\ 21$.",
    "The answer is option {c}.",
    "The correct answer is option ({c}).",
    "The correct option is {c}.",
    "The correct choice is ({c}), because 2 + 2 = 4.",
    "Therefore, option {c} is correct.",
    "So we choose {c}.",
    "I would select ({c}).",
    "Answer: {c}",
    "Answer: ({c}) 21",
    "**Answer: {c}**",
    "**Answer:** {c}. 21",
    "Final Answer: The final answer is $({c})$. I hope it is correct.",
    "The answer is:\n\n**({c})**",
    "#### {c}",
    "<answer>{c}</answer>",
    "({c})",
    "{c}",
    "答案：{c}",
    "答案是{c}。",
    "答案为（{c}）。",
    "故选：{c}",
    "因此选{c}。",
    "所以应选 {c}。",
    "正确选项是{c}。",
]
AS_CHOICE = [
    r"\boxed{{\textbf{{(B)}}\ {v}}}",
    r"\boxed{{\text{{(C) }}{v}}}",
    r"\boxed{{(D) {v}}}",
    "The answer is (B) {p}.",
    "The answer is B. {p}",
    "The correct answer is option (A): {p}",
    "答案：D. {p}",
]
"""A value with the letter it has among the options of its problem, which the gold answer does not say."""
NUMBER = re.compile(r"-?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?")


def kind_of(gold: str) -> str:
    """What kind of answer a gold answer is."""
    if NUMBER.fullmatch(gold.replace("{,}", ",").replace(r"\!", "")):
        return "number"
    if re.fullmatch(r"\\text\{\(?[A-J]\)?\}|[A-J]", gold):
        return "choice"
    if re.fullmatch(r"\\text\{[A-Za-z]{3,}\}|[A-Za-z]{3,}", gold):
        return "words"
    if re.fullmatch(r"[^()\[\]\\,]+(?:,\s*[^()\[\]\\,]+)+", gold) and not re.search("[a-zA-Z]{2}", gold):
        return "list"
    if gold[0] in "([" or gold.startswith((r"\left", r"\begin")):
        return "group"
    return "expression"


def golds(data: Path, seed: int) -> dict[str, list[str]]:
    """Different gold answers of the benchmarks by kind, drawn at random."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, column in SOURCES.items():
        for line in (data / name / "test.jsonl").open(encoding="utf-8"):
            gold = answer_in_gold(str(json.loads(line)[column]))
            if gold and not re.search(r"[A-Za-z]{4}\s[a-z]|p\.m|\\\$|\n", gold):
                found[kind_of(gold)].add(gold)
    draw = random.Random(seed)
    return {kind: draw.sample(sorted(found[kind]), min(count, len(found[kind]))) for kind, count in KINDS.items()}


def right_forms(kind: str, gold: str) -> Iterator[tuple[str, str]]:
    """Phrasings of an answer, each behind the phrasing's name."""
    if kind == "choice":
        letter = re.sub(r"\\text|[(){}]", "", gold)
        yield from ((form, form.format(c=letter)) for form in CHOICES)
        return
    plain = gold.replace("{,}", ",").replace(r"\!", "")
    if kind == "words":
        gold = plain = re.sub(r"\\text|[{}]", "", gold)
    shown = plain if kind in ("number", "words") else f"${gold}$"
    value = plain if kind == "number" else gold
    for form in EVERYWHERE + (AS_CHOICE if kind in ("number", "expression") else []):
        yield form, form.format(v=value, p=shown)
    if kind == "number":
        yield from number_forms(plain)
    if kind == "list":
        yield from list_forms([item.strip() for item in gold.split(",")])


def number_forms(plain: str) -> Iterator[tuple[str, str]]:
    """Phrasings of a plain number."""
    for form in NUMBERS:
        yield form, form.format(v=plain)
    for unit in UNITS:
        yield "The answer is {v} UNIT.", f"The answer is {plain} {unit}."
        yield r"\boxed{{{v} UNIT}}", rf"\boxed{{{plain} {unit}}}"
    digits = plain.replace(",", "")
    if re.fullmatch(r"-?\d{4,}", digits):
        for form in ("The answer is {v}.", r"\boxed{{{v}}}", "答案是{v}。"):
            yield form + " (thousands)", form.format(v=f"{int(digits):,}")
            yield form + " (no separator)", form.format(v=digits)


def list_forms(items: list[str]) -> Iterator[tuple[str, str]]:
    """Phrasings of several values."""
    for form in LISTS:
        for join in LIST_JOINS:
            yield f"{form} joined by {join!r}", form.format(l=join.join(items))
        yield f"{form} of formulas", form.format(l=", ".join(f"${item}$" for item in items))
        yield f"{form} of equations", form.format(l=" or ".join(f"x = {item}" for item in items))
    yield "set", r"\boxed{\{" + ", ".join(reversed(items)) + r"\}}"
    yield "boxes", " and ".join(rf"$\boxed{{{item}}}$" for item in items)
    yield "text and", r"\boxed{" + r" \text{ and } ".join(items) + "}"


def near_misses(kind: str, gold: str, others: list[str], draw: random.Random) -> Iterator[tuple[str, str]]:
    """Other answers than the gold one, each with what was changed."""
    if kind == "choice":
        letter = re.sub(r"\\text|[(){}]", "", gold)
        yield "another letter", "ABCDE".replace(letter, "")[draw.randrange(4)]
        return
    other = draw.choice([one for one in others if sorted(one) != sorted(gold)])  # 2, -1 is -1, 2
    yield "another gold", other
    if kind == "words":
        return
    if kind == "list":
        items = [item.strip() for item in gold.split(",")]
        if len({"".join(sorted(re.sub(r"[\s+]", "", item))) for item in items}) == len(items):  # 11+x and x+11 are one
            for item in (items[0], items[-1]):
                yield "one item", item
            yield "an item less", ", ".join(items[:-1])
            yield "an item more", ", ".join([*items, "97"])
    # Units count for nothing, their exponents neither.
    positions = [match.start() for match in re.finditer(r"\d", re.split(r"\\(?:text|mbox|mathrm)", gold)[0])]
    if positions:
        at = draw.choice(positions)
        digit = draw.choice([one for one in "123456789" if one != gold[at]])
        yield "a digit", gold[:at] + digit + gold[at + 1 :]
        last = positions[-1]
        yield "the last digit", gold[:last] + str((int(gold[last]) + 1) % 10) + gold[last + 1 :]
    if kind == "number":
        plain = gold.replace("{,}", "").replace(r"\!", "").replace(",", "")
        yield "sign", plain[1:] if plain[0] == "-" else "-" + plain
        if "." not in plain:
            for change, value in (("one more", 1), ("one less", -1)):
                yield change, str(int(plain) + value)
            yield "a digit more", plain + str(draw.randrange(10))
            if len(plain.lstrip("-")) > 1:
                yield "a digit less", plain[:-1]
                yield "its last digit", plain[-1]
            yield "half more", plain + ".5"
            yield "as a base", "1/" + plain
        yield (
            "without its point" if "." in plain else "times 1000",
            plain.replace(".", "") if "." in plain else plain + "000",
        )


def same_number(one: str, other: str) -> bool:
    """Whether two plain numbers are equal, by means that the verifier does not use."""
    try:
        return Fraction(one.replace("{,}", "").replace(",", "")) == Fraction(other.replace("{,}", "").replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return False


Row = tuple[str, str, str, str]
"""Kind of the gold answer, phrasing, response, gold answer."""


def rows(data: Path, seed: int) -> tuple[list[Row], list[Row]]:
    """Right and wrong responses."""
    chosen, draw = golds(data, seed), random.Random(seed)
    right: list[Row] = []
    wrong: list[Row] = []
    for kind, answers in chosen.items():
        for gold in answers:
            forms = list(right_forms(kind, gold))
            picked = forms if kind in ("list", "choice") else draw.sample(forms, min(24, len(forms)))
            right += [(kind, form, response, gold) for form, response in picked]
            for change, value in near_misses(kind, gold, answers, draw):
                if value == gold or same_number(value, gold):
                    continue
                kind_of_value = kind if kind != "list" or "," in value else "number"
                for form, response in draw.sample(list(right_forms(kind_of_value, value)), 6):
                    if "%" not in response or "%" in value:  # 0.53 is 53 %
                        wrong.append((kind, f"{change}: {form}", response, gold))
    return right, wrong


def main() -> None:
    """Print the shares of accepted right and wrong answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmarks' files")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of gold answers and changes")
    parser.add_argument("--show", type=int, default=0, help="rows to print that went wrong")
    args = parser.parse_args()
    right, wrong = rows(args.data, args.seed)
    print("| gold answers | right | accepted | | wrong | accepted |")
    print("|---|---:|---:|---:|---:|---:|")
    missed, taken = verdicts(right, accepted=False), verdicts(wrong, accepted=True)
    for kind in [*KINDS, "all"]:
        n = [sum(row[0] == kind or kind == "all" for row in part) for part in (right, missed, wrong, taken)]
        print(f"| {kind} | {n[0]} | {n[0] - n[1]} | {1 - n[1] / n[0]:.1%} | {n[2]} | {n[3]} |")
    if args.show:
        print("\nphrasings that are missed most:")
        for form, count in Counter(row[1] for row in missed).most_common(args.show):
            print(f"  {count:4} {form!r}")
        for title, part in (("right, not accepted", missed), ("wrong, accepted", taken)):
            print(f"\n{title}:")
            for kind, form, response, gold in part[: args.show]:
                print(f"  {kind} {form!r}: gold {gold!r}, response {response!r}: {grade(response, gold)}")


def verdicts(part: list[Row], accepted: bool) -> list[Row]:
    """Rows that are accepted, or those that are not."""
    return [row for row in part if (grade(row[2], row[3]).verdict == Verdict.CORRECT) == accepted]


if __name__ == "__main__":
    main()
