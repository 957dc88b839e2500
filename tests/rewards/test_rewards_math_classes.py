"""Classes of answers that were once misjudged: of each, what is equal and what is not."""

from __future__ import annotations

import pytest

from gapo_megatron.rewards import math
from gapo_megatron.types import Outcome

# By class: equal pairs and different ones, (reference, given).
CLASSES: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "of every kind": (
        [
            ("1000", "1,000"), ("1000", "1 000"), ("1/3", "0.333333"), ("\\dfrac{1}{2}", "0.5"),
            ("16.\\overline{6}", "50/3"), ("4.6 \\times 10^{-24}", "4.6e-24"), ("$42$", "42"),
            ("\\[\n\\boxed{42}\n\\]", "42"),
            # percent, money, units, degrees
            ("0.05", "5\\%"), ("8", "8\\text{ apples}"), ("90", "90^{\\circ}"),
            ("2 \\text{ million}", "2 million"), ("4.5\\text{ billion dollars}", "4500000000"),
            ("320000 \\mbox{ acres}", "320000"), ("2\\pi\\text{ radians}", "2\\pi"),
            # roots, symbols, functions
            ("2\\pi", "2*pi"), ("ab", "ba"), ("\\sin x", "sin(x)"),
            # equations and inequalities
            ("y = \\frac{1}{3} x + 8", "y=x/3+8"), ("x^2-6x-7=0", "(x-7)(x+1)=0"),
            ("0 < x \\le 2", "x \\in (0, 2]"), ("x \\geq 5", "x >= 5"),
            # tuples, intervals, sets, lists
            ("(3, \\frac{\\pi}{2})", "\\left( 3, \\frac{\\pi}{2} \\right)"), ("\\{5\\}", "5"),
            ("x=1\\text{ or }x=2", "2, 1"), ("64,\\frac{1}{4}", "1/4; 64"),
            ("(1,2),(3,4)", "(3,4),(1,2)"), ("f(x)=0, f(x)=x", "f(x)=x, f(x)=0"),
            ("x=1, y=2", "y=2, x=1"), ("\\$5, \\$7", "7, 5"),
            # plus and minus
            ("\\{1\\pm\\sqrt{5},-2\\}", "-2,1+\\sqrt5,1-\\sqrt5"), ("5,-5", "\\pm5"),
            (r"\frac{-4 \pm \sqrt{31}}{15}", r"\frac{-4+\sqrt{31}}{15},\frac{-4-\sqrt{31}}{15}"),
            # matrices
            (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix}1\\ \frac42\end{bmatrix}"),
            # numerals
            ("1011_2", "1011_{2}"), ("204_5", "204_{\\text{five}}"),
            # words, choices, times of day
            ("\\text{Friday}", "friday"), ("Bob", "\\text{Bob}"), ("\\text{odd}", "odd"),
            ("\\text{(B)}", "(B) 5"), ("B", "\\textbf{(B)}\\ 5"),
            ("4\\!:\\!51\\!:\\!06 \\text{ p.m.}", "4:51:06 PM"),
            ("10\\sqrt{3}", "{}10{}\\sqrt{3}"), ("\\binom{4025}{2013}", "\\binom{4025}{2012}"),
        ],
        [
            ("2.0\\pi \\times 10^{-8}", "10^{-8}\\pi"), ("3 1/2", "31/2"), ("x<3", "x>3"),
            ("x<3", "x\\le3"), ("\\pm 5", "5"),
            (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"),
            ("\\infty", "-\\infty"), ("\\text{east}", "west"), ("5", "\\text{east}"),
            ("\\text{(B)}", "(C) B"), ("3:00", "7"), ("5\\text{ or less}", "5"),
            ("2\\text{ thousand}", "2\\text{ million}"),
        ],
    ),
    "letters behind a value are no units": (
        [
            (r"\frac{gh}{2}", r"\frac12 gh"), (r"v_0 t - \frac12 g t^2", "v_0t-gt^2/2"),
            ("a^2bc", "bca^2"), (r"2\pi rh", r"2\pi hr"), (r"\frac{m}{m+M}g", r"\frac{mg}{M+m}"),
            ("15cm", "15"), (r"15\mathrm{~cm}", r"15\text{ cm}"),
            (r"3\text{ meters}", r"3\text{ m}"), ("n o", "on"),
        ],
        [
            ("5t", "5"), (r"\sqrt{2gh}", r"\sqrt{2g}"), ("7", "7t"), ("4", "4g"), ("R-r", "0"),
            (r"\pi(R^2-r^2)", "0"),
        ],
    ),
    "all of the box is read, or nothing": (
        [
            (r"2^\frac{1}{3}", r"\sqrt[3]{2}"), (r"2^\sqrt2", r"2^{\sqrt{2}}"),
            (r"\left(\frac23\right)^\frac34", "(2/3)^{3/4}"),
            (r"\frac12, \frac13", r"\frac12 \lor \frac13"),
            (r"\frac12 \lor \frac13", r"\frac13,\frac12"),
            (r"\frac{48}{5}\sqrt{6}", r"{48 \over 5}\sqrt6"), ("3^{-17.5}", r"\mathbf{3^{-17.5}}"),
            ("60", r"x = \boxed{60}"), ("1179_{12}", r"\mathbf{1179_{12}}"), ("5", "x{=}5"),
        ],
        [
            (r"\frac13", r"\frac12 \lor \frac13"), (r"2^\frac13", r"\frac13"),
            (r"2^\frac13", r"2^\frac12"), (r"\frac{1}{2}", r"\spam \frac{1}{2}"),
            (r"\frac{5}{7}", r"\frac{3}{7} \vee \frac{5}{7}"),
            (r"\frac{1}{2}", r"\frac{1}{4} \Rightarrow? \frac{1}{2}"),
            (r"\frac{1}{3}", r"{{ \foo} \frac{1}{3}"),
            (r"\frac{7}{8}", r"\frac{1}{8} \oplus \frac{7}{8}"),
            (r"\frac{48}{5}\sqrt{6}", r"{48 \over 7}\sqrt6"), ("60", r"\boxed{60}, 17"),
            ("60", r"17, \boxed{60}"), ("1179_{12}", r"\mathbf{1179_{13}}"),
        ],
    ),
    "text between numbers": (
        [
            (r"2\text{ boys and }4\text{ girls}", "4 girls and 2 boys"),
            (r"6\text{ feet }3\text{ inches}", r"75\text{ inches}"),
            (r"3\text{ hours }20\text{ minutes}", "200 minutes"),
            (r"1\text{ hour }30\text{ minutes}", "1.5 hours"),
            (r"5\text{ red and }3\text{ blue}", "5 red and 3 blue"),
            (r"12\text{ nickels and }7\text{ dimes}", r"12\text{ nickels},\ 7\text{ dimes}"),
            (r"\$3\text{ and }20\text{ cents}", r"\$3\text{ and }20\text{ cents}"),
            (r"3\text{ out of }4", r"\text{3 out of 4}"),
        ],
        [
            (r"2\text{ boys and }4\text{ girls}", r"2\text{ boys and }3\text{ girls}"),
            (r"6\text{ feet }3\text{ inches}", "6"),
            (r"3\text{ hours }20\text{ minutes}", r"3\text{ hours }2\text{ minutes}"),
            ("6", r"6\text{ feet }3\text{ inches}"),
            (r"5\text{ red and }3\text{ blue}", r"5\text{ red and }4\text{ blue}"),
            (r"1\text{ to }3", r"1\text{ to }4"),
            (r"3\text{ weeks and }2\text{ days}", r"3\text{ weeks and }2\text{ hours}"),
            (r"3\text{ out of }4", r"\text{3 out of 5}"),
            (r"\$5\text{ and }20\text{ cents}", r"\$5"), (r"5\text{ remainder }2", "5"),
        ],
    ),
    "ellipses, bases and degrees are part of the value": (
        [
            (r"\{1,2,\ldots\}", r"\{1, 2, \dots\}"), ("1,2,3,...", r"1,2,3,\ldots"),
            (r"\{2,4,6,\cdots\}", r"\{2,4,6,\ldots\}"), (r"\cos 60^{\circ}", r"\cos\frac{\pi}{3}"),
        ],
        [
            (r"\{1,2\}", r"\{1,2,\ldots\}"), ("3,5,7", r"3,5,7,\cdots"), ("10_{12}", "10_1"),
            (r"\tan 45", r"\tan 45^\circ"), (r"\cos 2", r"\cos 2\degree"),
            (r"\sin(10)", r"\sin(10°)"), ("x,y", r"x,y,\dots"), ("(1,2)", r"\{1,2\}"),
            (r"\{1,2\}", "(1,2)"), ("2A5_{16}", r"2\text{B}5_{16}"),
        ],
    ),
    "thousands separators beside other text": (
        [
            ("1260", "x = 1,260"), ("-1500x", "-1,500x"), (r"1\,260\pi", r"1260\pi"),
            (r"10000\pi\text{ cm}^2", r"10{,}000\pi"),
        ],
        [
            ("1260", "x=1,261"), (r"12000\sqrt{2}", r"1,200\sqrt2"), ("(1,260)", "(1,261)"),
            ("(1000, 2000)", "(1,000, 2,001)"), ("(1, 0, 2)", "(1,000, 2)"),
        ],
    ),
    "times of day": (
        [
            ("10:15 AM", "10:15 a.m."), ("7:05 pm", "07:05 P.M."),
            (r"12:00\text{ noon}", "12:00 p.m."), ("4:00 PM", "16:00"),
            ("11:45 a.m.", r"\text{11:45 AM}"), ("5 PM", "5:00 pm"),
            ("3:30 PM", r"3{:}30\text{ PM}"), (r"5:00\text{ p.m.}", r"5\text{ o'clock p.m.}"),
            (r"\text{midnight}", r"12:00\text{ a.m.}"), (r"12:00\text{ p.m.}", r"\text{noon}"),
        ],
        [
            ("3:30 PM", "4:30 PM"), ("10:15 AM", r"10:15\text{ p.m.}"), ("7:05 pm", "7:50 pm"),
            ("16:00", "4:00 a.m."), ("4 PM", "4 AM"), ("3:30 PM", "3.5"),
            (r"\text{noon}", r"\text{midnight}"),
        ],
    ),
    "upright letters": (
        [
            (r"3+4\mathrm{i}", "4i+3"), (r"\mathrm{e}^{\mathrm{i}\pi}", "-1"),
            (r"\frac{\mathrm e}{2}", r"\frac{e}{2}"), (r"{\rm e}^3", "e^3"),
            (r"\mathit{x}+1", "x+1"), (r"\mathbf{12}", "12"), (r"\boldsymbol{x^2}", "x^2"),
            (r"\mathrm{ln} 2", r"\ln 2"), (r"\operatorname{arctan} 2", r"\arctan 2"),
        ],
        [
            ("e^2", r"\mathrm{e}^3"), (r"2\mathrm{i}", "2"), (r"\mathit{x}+1", r"\mathit{y}+1"),
            (r"\mathbf{12}", r"\mathbf{21}"),
        ],
    ),
    "degrees in functions": (
        [
            ("1", r"\tan 45^\circ"), (r"\frac{3}{4}", r"\sin^2 60^\circ"),
            (r"\tan 60°", r"\sqrt3"), (r"\cot 30\degree", r"\sqrt3"),
            (r"\cos 60\text{ degrees}", "1/2"),
        ],
        [
            (r"\frac34", r"\sin^2 30^\circ"),
        ],
    ),
    "intervals and inequalities": (
        [
            (r"-2\le x\le 7", "[-2,7]"), ("[0,2)", r"0\leq x<2"), (r"[2,\infty)", r"x \geq 2"),
            (r"(-\infty,-2)\cup(3,\infty)", r"x<-2 \text{ or } x>3"),
            (r"x<-2 \text{ or } x>3", r"(-\infty,-2)\cup(3,\infty)"),
            ("[-2,7]", r"\{x \mid -2\le x\le 7\}"), ("(0,1)", r"\{x\in\mathbb{R}: 0<x<1\}"),
            (r"[\frac12,\infty)", r"k\ge \frac12"), (r"(0,1)\cup(1,\infty)", r"x>0, x\neq 1"),
            ("|x|<3", "-3<x<3"), (r"x>0, x\neq1", r"(0,1)\cup(1,\infty)"),
            (r"|x|\le 2", r"2\ge x\ge -2"), ("(0,1)", "]0,1["), (r"\left]0,1\right]", "0<x\\le1"),
            (r"(-\infty,1)\cup[2,3)", r"x\in]-\infty,1[\cup[2;3["), ("[0,1[", "[0,1)"),
            ("(0,1)", r"\text{Domain}=]0,1[."),
        ],
        [
            (r"(-\infty,-2)\cup(3,\infty)", r"x<-2 \text{ or } x\ge3"), ("[-2,7]", "[-2,7)"),
            ("1<x<3", r"3>x\ge1"), ("[0,1]", "]0,1["), ("]0,1]", "[0,1["),
            ("1<x<3", r"x>1\text{ and }y<3"),
            (r"(-\infty,1)\cup(2,\infty)", r"x<1\text{ or }y>2"),
            (r"(-\infty,1)\cup(2,\infty)", r"x<1\text{ and }x>2"),
            (r"(0,1)\cup(1,\infty)", r"x>0, x\neq 2"),
        ],
    ),
    "choices with a value": (
        [
            ("12", "B. 12"), (r"2+\sqrt3", r"\text{(E)}\quad 2+\sqrt{3}"),
            ("1,2", r"\textbf{(A)}~1,2"), (r"\textbf{(B)}\ 12", "12"), (r"\textbf{(B)}\ 12", "B"),
            ("B", r"\text{Option B}"), ("B", r"\text{The answer is B}"), (r"(\text{H})", "H"),
            ("B", "Option B"), ("Choice B", "(B)"), (r"\textbf{(B)}\ 12", "Option (B)"),
        ],
        [
            ("12", r"\textbf{(B)}\ 13"), (r"\frac34", r"\textbf{(C) }\frac{4}{3}"),
            (r"\textbf{(B)}\ 12", r"\textbf{(C)}\ 12"), (r"\textbf{(B)}\ 12", "C"),
            ("B", r"\textbf{(C)}\ 12"), ("B", r"\text{Option C}"), (r"(\text{H})", "G"),
            ("B", "Option C"), ("Option B", "Choice C"),
            ("7", r"\text{The answer is 8}"), ("7", r"\text{It is less than 7}"),
        ],
    ),
    "units, bare and in text": (
        [
            ("245 yd.", "245"), ("245", "245 yd."),
            (r"7\text{ minutes and }5\text{ seconds}", "7 minutes and 5 seconds"),
            ("10", "10 days"), ("12", "12 students"), (r"50\text{ km/h}", "50 km/h"),
            ("8", r"8\text{ sq. units}"), ("36", "36 square units"), ("6 ft", "6 feet"),
            (r"100\text{ cm}^2", r"100\text{ square centimeters}"),
            ("10 weeks", r"10\text{ weeks}"), ("60 mph", r"60\text{ miles per hour}"),
            ("30 cents", r"\$0.30"), (r"2\text{ dozen}", "24"),
        ],
        [
            ("245 yd.", "245 ft"), (r"\$5", r"5\text{ euros}"), ("10 weeks", "10 days"),
            ("7 minutes and 5 seconds", "7 minutes and 6 seconds"),
            ("7 minutes and 5 seconds", "7 minutes"), ("15 mph", "15 km/h"),
            (r"16\pi\text{ cm}", r"16\pi\text{ m}"), ("10", "10 or more"),
        ],
    ),
    "names of arguments, empty sets, imaginary units": (
        [
            ("y=x+1", "f(x)=x+1"), ("x+1", "f(x)=x+1"), ("P(x)=x^3-x", "P(t)=t(t-1)(t+1)"),
            (r"\emptyset", r"\varnothing"), (r"\varnothing", r"\{\}"), (r"\emptyset", "∅"),
            ("a+bi", "bi+a"), ("y=2x+1", "f(t)=2t+1"), ("a_n=2n+1", "a_k=2k+1"),
            ("f(x)=x", r"f(x)=x\text{ for all }x"),
            (r"f(x)=0,f(x)=3x\text{ }\forall x", "f(x)=0, f(x)=3x"), (r"\emptyset", "Ø"),
            (r"\emptyset", r"\text{no solution}"),
            (r"\text{no solution}", r"\text{No real solutions}"),
        ],
        [
            ("f(x)=x+1", "f(t)=t-1"), ("f(x)=x+1", "f(t)=x+1"), ("y=x+1", "f(x)=x+2"),
            ("f(x)=x+1", "f(t)=t+x"), ("a_n=n^2", "a_k=n^2"),
            ("f(x)=x", r"f(x)=x\text{ for all }x>0"),
            (r"\text{no solution}", r"\text{one solution}"),
            (r"\emptyset", r"\text{infinitely many solutions}"),
        ],
    ),
    "nothing to read, or too much to compute": (
        [
        ],
        [
            ("3", "9^{9^{9^9}}"), ("3", "9**9**9**9"), ("3", r"\text{?}"), ("3", r"\dots"),
            ("3", r"\int_0^1 x^{x^x} dx"), ("3", "1e999999999"),
            ("3", r"\sum_{k=1}^{10^{12}} \frac{1}{k}"), ("3", r"\prod_{k=1}^{10^9} k"),
            ("3", r"\binom{10^{10}}{5\cdot 10^9}"), ("3", r"\text{unknown}"), ("3", "@@"),
            ("3", r"\sqrt{}"), ("3", r"\tan^{-1}(9^{9^9})"), ("3", r"\frac{1}{0}"),
            ("3", r"\lim_{x \to 0} \frac{\sin x}{x^{99}}"), ("3", "x^{999999999}"),
            ("x+1", "(x+1)^{500000}"), ("x", r"\binom{n}{99999}"),
            (r"a=0\text{ and }ab\ne 0", r"a=0\text{ and }ab\ne 1"),
        ],
    ),
    "a factor d, and differentials": (
        [
            ("8dt", "8td"), ("adx", "dxa"), (r"d\cdot t", "td"), (r"2\pi d r", r"2\pi rd"),
            ("2dz+1", "1+2zd"), ("d(a+b)", "da+db"), (r"8d\theta", r"8\theta d"),
            (r"\frac{ad}{bc}", r"\frac{da}{cb}"), (r"\frac{dy}{dx}=x", r"x=\frac{dy}{dx}"),
            (r"x\,dy=y\,dx", "xdy=ydx"),
        ],
        [
            ("8dt", "8d"), ("ad", "a"), (r"d\cdot t", "d+t"), (r"x\,dy=y\,dx", r"x\,dx=y\,dy"),
            ("2dz+1", "2d+1"), (r"\frac{dy}{dx}=x", r"\frac{dx}{dy}=x"),
            (r"\frac{dy}{dx}=y", r"\frac{dz}{dx}=y"), ("v_{d}t", "vdt"),
        ],
    ),
    "large, small and complex values": (
        [
            (r"3^{100}-1", r"(3^{50}-1)(3^{50}+1)"), ("z=2+3i", "3i+2"), ("(1+i, 2)", "(i+1,2)"),
        ],
        [
            (r"100!", r"99!"), ("z=2+3i", "2-3i"), ("x^2+1=0", "x^2+2=0"),
            ("x^2+y^2=1", "x^2+y^2=2"),
        ],
    ),
    "alternatives and lists": (
        [
            (r"\frac32 \text{ or } 1.5", "1.5"), (r"\text{B,C}", "C, B"),
            (r"\frac12, \frac13", r"\frac13 \text{ OR } \frac12"), ("11^{\\text{th}}", "11"),
            (r"1,2,\ldots,9", "1,2,...,9"),
        ],
        [
            (r"\frac32 \text{ or } 2.5", "1.5"), ("5", r"5 \pm 1"), (r"\text{(B)}", "(B), (C)"),
            ("12", r"\text{between } 12 \text{ and } 13"), (r"1,2,\ldots,9", "1,2,...,8"),
            ("3", r"x \in \{1, 3\}"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_equal_members_of_the_class_are_correct(name):
    equal, _ = CLASSES[name]
    outcomes = {pair: _judge(*pair) for pair in equal}
    assert {pair: one for pair, one in outcomes.items() if one is not Outcome.CORRECT} == {}


@pytest.mark.parametrize("name", CLASSES)
def test_different_members_of_the_class_are_wrong(name):
    _, different = CLASSES[name]
    outcomes = {pair: _judge(*pair) for pair in different}
    assert {pair: one for pair, one in outcomes.items() if one is not Outcome.WRONG} == {}


def _judge(reference: str, given: str) -> Outcome:
    return math.verify(f"Therefore $\\boxed{{{given}}}$.", reference).outcome
