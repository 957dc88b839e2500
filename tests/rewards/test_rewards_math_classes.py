"""Classes of answers that were once misjudged: of each, what is equal and what is not."""

from __future__ import annotations

import pytest

from gapo_megatron.rewards import math
from gapo_megatron.types import Outcome

# By class: equal pairs and different ones, (reference, given).
CLASSES: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "letters behind a value are no units": (
        [
            ("1+2t", "2t+1"), (r"\cos t", r"\cos(t)"), ("3m", r"m\cdot 3"),
            (r"\frac{gh}{2}", r"\frac12 gh"), ("2s+1", "1+2s"),
            (r"v_0 t - \frac12 g t^2", "v_0t-gt^2/2"), (r"6\pi l", r"6 l\pi"),
            (r"\sin s", r"\sin(s)"), ("12d", "d*12"), ("4ab", "4ba"), ("a^2bc", "bca^2"),
            (r"2\pi rh", r"2\pi hr"), (r"\frac{m}{m+M}g", r"\frac{mg}{M+m}"), ("15cm", "15"),
            (r"15\text{ cm}", "15cm"), (r"15\mathrm{~cm}", r"15\text{ cm}"),
            (r"3\text{ meters}", r"3\text{ m}"), ("n o", "on"),
        ],
        [
            (r"\pi r^2 h", r"\pi r^2"), ("2m", "2"), ("5t", "5"), ("a+b+c", "a+b"), ("3s", "3"),
            (r"\sqrt{2gh}", r"\sqrt{2g}"), (r"2\pi l", r"2\pi"), ("x^2d", "x^2"), ("7", "7t"),
            ("4", "4g"), (r"\pi r^2", r"\pi r^2 h"), ("2ab", "2"), ("m g h", "m g"),
            ("1+2t", "1+2"), ("R-r", "0"), ("3o", "3"), (r"\pi(R^2-r^2)", "0"),
        ],
    ),
    "all of the box is read, or nothing": (
        [
            (r"2^\frac13", r"2^{\frac13}"), (r"2^{\frac13}", r"2^\frac13"),
            (r"2^\frac{1}{3}", r"\sqrt[3]{2}"), (r"x^\frac12", r"\sqrt{x}"),
            (r"e^\frac{1}{2}", r"\sqrt e"), (r"3^\frac{2}{5}", r"\sqrt[5]{9}"),
            (r"2^\sqrt2", r"2^{\sqrt{2}}"), (r"\left(\frac23\right)^\frac34", "(2/3)^{3/4}"),
            (r"a^\frac{1}{n}", "a^{1/n}"), (r"\frac\pi2", r"\pi/2"),
            (r"\frac{\sqrt3}2", r"\frac{\sqrt 3}{2}"), (r"\sqrt\frac12", r"\frac{\sqrt2}{2}"),
            (r"\frac12, \frac13", r"\frac12 \lor \frac13"),
            (r"\frac12 \lor \frac13", r"\frac13,\frac12"),
            (r"10^\frac{-1}{2}", r"\frac{1}{\sqrt{10}}"),
            (r"\frac{48}{5}\sqrt{6}", r"{48 \over 5}\sqrt6"),
            (r"\frac{\sqrt{3}}{2}", r"{\sqrt{3} \over 2}"),
            ("3^{-17.5}", r"\mathbf{3^{-17.5}}"), ("60", r"x = \boxed{60}"),
            ("1179_{12}", r"\mathbf{1179_{12}}"), (r"\{(a,b)\}", r"{\{(a,b)\}}."),
            ("5", "x{=}5"), (r"\pi", r"\mathrm{\pi}"),
        ],
        [
            (r"\frac13", r"\frac12 \lor \frac13"), (r"2^\frac13", r"\frac13"),
            (r"2^\frac13", r"2^\frac12"), (r"\frac34", r"x^\frac34"),
            (r"\frac{1}{2}", r"\spam \frac{1}{2}"),
            (r"\frac{5}{7}", r"\frac{3}{7} \vee \frac{5}{7}"), 
            (r"\frac{1}{2}", r"\frac{1}{4} \Rightarrow? \frac{1}{2}"),
            (r"3^\frac25", r"\frac{2}{5}"), (r"\frac{1}{3}", r"{{ \foo} \frac{1}{3}"),
            (r"\frac{7}{8}", r"\frac{1}{8} \oplus \frac{7}{8}"), (r"e^\frac12", r"\frac{1}{2}"),
            (r"\frac{48}{5}\sqrt{6}", r"{48 \over 7}\sqrt6"), ("60", r"\boxed{60}, 17"),
            ("60", r"17, \boxed{60}"),
            ("60", r"\boxed{60} \text{ or } 61"), ("3^{-17.5}", r"\mathbf{3^{-17.6}}"),
            ("5", r"\boxed{5}+1"), ("1179_{12}", r"\mathbf{1179_{13}}"),
        ],
    ),
    "text between numbers": (
        [
            (r"6\text{ feet }3\text{ inches}", "6 feet 3 inches"),
            (r"2\text{ boys and }4\text{ girls}", "4 girls and 2 boys"),
            (r"2\text{ boys and }4\text{ girls}", r"2\text{ boys, }4\text{ girls}"),
            (r"6\text{ feet }3\text{ inches}", r"75\text{ inches}"),
            (r"3\text{ hours }20\text{ minutes}", "200 minutes"),
            (r"1\text{ hour }30\text{ minutes}", "1.5 hours"),
            (r"5\text{ red and }3\text{ blue}", "5 red and 3 blue"),
            (r"12\text{ nickels and }7\text{ dimes}", r"12\text{ nickels},\ 7\text{ dimes}"),
            (r"\$3\text{ and }20\text{ cents}", r"\$3\text{ and }20\text{ cents}"),
            (r"\$5\text{ and }20\text{ cents}", r"\$5.20"),
            (r"\$5\text{ and }20\text{ cents}", r"520\text{ cents}"),
            (r"3\text{ out of }4", r"\text{3 out of 4}"),
            (r"2\text{ hours }15\text{ minutes}", r"\text{2 hours and 15 minutes}"),
            ("20", r"\text{20 ways}"), (r"8\text{ hours}", r"\text{8 hours}"),
        ],
        [
            (r"6\text{ feet }3\text{ inches}", r"6\text{ feet }5\text{ inches}"),
            (r"2\text{ boys and }4\text{ girls}", r"2\text{ boys and }3\text{ girls}"),
            (r"6\text{ feet }3\text{ inches}", r"6\text{ feet}"),
            (r"6\text{ feet }3\text{ inches}", "6"),
            (r"2\text{ boys and }4\text{ girls}", r"4\text{ boys and }2\text{ girls}"),
            (r"3\text{ hours }20\text{ minutes}", r"3\text{ hours }2\text{ minutes}"),
            ("6", r"6\text{ feet }3\text{ inches}"),
            (r"5\text{ red and }3\text{ blue}", r"5\text{ red and }4\text{ blue}"),
            (r"1\text{ to }3", r"1\text{ to }4"), (r"7\text{ out of }9", r"7\text{ out of }8"),
            (r"3\text{ weeks and }2\text{ days}", r"3\text{ weeks and }2\text{ hours}"),
            (r"3\text{ out of }4", "3"), (r"3\text{ out of }4", "?"),
            (r"3\text{ out of }4", r"\text{3 out of 5}"),
            (r"\$5\text{ and }20\text{ cents}", r"\$5"),
            (r"5\text{ remainder }2", "5"), (r"8\text{ hours}", r"\text{9 hours}"),
            ("12", r"\text{12 or 13}"),
        ],
    ),
    "ellipses, bases and degrees are part of the value": (
        [
            (r"\{1,2,\ldots\}", r"\{1, 2, \dots\}"), ("1,2,3,...", r"1,2,3,\ldots"),
            (r"\{2,4,6,\cdots\}", r"\{2,4,6,\ldots\}"), ("1011_{22}", "1011_{22}"),
            (r"\sin 1^\circ", r"\sin(1^\circ)"), ("10_{12}", "10_{12}"),
            (r"1,2,\ldots,n", r"1, 2, \dots, n"), (r"\cos 60^{\circ}", r"\cos\frac{\pi}{3}"),
            (r"2\text{A}5_{16}", "2A5_{16}"), ("2A5_{16}", r"2\text{A}5_{16}"),
            (r"\{1,2\}", "1, 2"),
        ],
        [
            (r"\{1,2\}", r"\{1,2,\ldots\}"), ("1,2", "1,2,..."), (r"\{1,2,\ldots\}", r"\{1,2\}"),
            ("3,5,7", r"3,5,7,\cdots"), ("1011_2", "1011_22"), ("1011_{22}", "1011_2"),
            ("10_{12}", "10_1"), ("12_3", "12_34"), ("1011_2", "1011_{20}"),
            (r"\sin 1", r"\sin 1^\circ"), (r"\sin 1^\circ", r"\sin 1"),
            (r"\tan 45", r"\tan 45^\circ"), (r"\cos 2", r"\cos 2\degree"),
            (r"\sin(10)", r"\sin(10°)"), ("x,y", r"x,y,\dots"), ("6", r"1+2+3+\ldots"),
            ("(1,2)", r"\{1,2\}"), (r"\{1,2\}", "(1,2)"),
            ("(1,2,3)", r"\{1,2,3\}"), ("2A5_{16}", r"2\text{B}5_{16}"),
        ],
    ),
    "thousands separators beside other text": (
        [
            ("1260", "x = 1,260"), (r"1260\pi", r"1{,}260\pi"), (r"1260\pi", r"1,260\pi"),
            ("x=1260", "x=1{,}260"), (r"\frac{1000}{3}", r"\frac{1,000}{3}"),
            (r"\frac{1000}{3}", r"\frac{1{,}000}{3}"), (r"12000\sqrt{2}", r"12,000\sqrt2"),
            ("-1500x", "-1,500x"), ("1,234,567", "n=1234567"),
            (r"2500+300\pi", r"2{,}500+300\pi"), (r"1,260\text{ cm}", "1260"),
            (r"\$1,260.50", "1260.5"), (r"1\,260\pi", r"1260\pi"),
            (r"10000\pi\text{ cm}^2", r"10{,}000\pi"), ("A = 3000", "A = 3,000"),
            (r"\sqrt{1,024}", "32"),
            ("(1000, 2000)", "(1,000, 2,000)"), ("(100,200,300)", "(100, 200, 300)"),
            (r"\$1,260.50", r"\text{\$1,260.50}"),
        ],
        [
            ("1260", "x=1,261"), (r"1260\pi", r"1,206\pi"), (r"1260\pi", r"12,60\pi"),
            ("1260", "x=126,0"), ("(1,260)", "1260"), (r"\frac{1000}{3}", r"\frac{1,00}{3}"),
            ("1260", "1,26"), (r"12000\sqrt{2}", r"1,200\sqrt2"), ("1001", "1,100"),
            ("(1,260)", "(1,261)"),
            ("(1000, 2000)", "(1,000, 2,001)"), ("(1, 0, 2)", "(1,000, 2)"),
            ("(1,234)", "1,234"),
        ],
    ),
    "times of day": (
        [
            ("3:30 PM", "3:30 p.m."), ("3:30 PM", r"3:30\text{ p.m.}"),
            ("3:30 p.m.", r"3:30\ \mathrm{PM}"), ("10:15 AM", "10:15 a.m."),
            ("7:05 pm", "07:05 P.M."), (r"12:00\text{ noon}", "12:00 p.m."),
            ("4:00 PM", "4 p.m."), ("4:00 PM", "16:00"), ("3:30 PM", "3:30"),
            ("11:45 a.m.", r"\text{11:45 AM}"), ("5 PM", "5:00 pm"),
            ("3:30 PM", r"3{:}30\text{ PM}"), (r"5:00\text{ p.m.}", r"5\text{ o'clock p.m.}"),
            (r"\text{midnight}", r"12:00\text{ a.m.}"), (r"12:00\text{ p.m.}", r"\text{noon}"),
        ],
        [
            ("3:30 PM", "3:30 a.m."), ("3:30 PM", "3:31 PM"), ("3:30 PM", "4:30 PM"),
            ("10:15 AM", r"10:15\text{ p.m.}"), ("7:05 pm", "7:50 pm"), ("16:00", "4:00 a.m."),
            ("4 PM", "4 AM"), ("12:00 noon", "12:00 a.m."), ("3:30 PM", "3.5"),
            (r"\text{noon}", r"\text{midnight}"), (r"\text{noon}", r"12:00\text{ a.m.}"),
        ],
    ),
    "upright letters": (
        [
            ("e^2", r"\mathrm{e}^2"), (r"\mathrm{e}^2", "e^2"), ("2i", r"2\mathrm{i}"),
            (r"2\mathrm{i}", "2i"), (r"3+4\mathrm{i}", "4i+3"),
            (r"\mathrm{e}^{\mathrm{i}\pi}", "-1"), (r"\text{e}", "e"),
            (r"\frac{\mathrm e}{2}", r"\frac{e}{2}"), (r"\frac{\mathrm{e}}{2}", "e/2"),
            (r"\operatorname{e}^x", "e^x"), (r"{\rm e}^3", "e^3"), (r"\mathit{x}+1", "x+1"),
            (r"\mathbf{12}", "12"), (r"\boldsymbol{x^2}", "x^2"), (r"\mathrm{ln} 2", r"\ln 2"),
            (r"\operatorname{arctan} 2", r"\arctan 2"), (r"\mathrm{e}^{-1}", r"\frac{1}{e}"),
            (r"1-\mathrm{e}^{-x}", "1-e^{-x}"),
        ],
        [
            ("e^2", r"\mathrm{e}^3"), (r"\mathrm{e}^2", r"2\mathrm{e}"), ("2i", r"-2\mathrm{i}"),
            (r"2\mathrm{i}", "2"), (r"\mathrm{e}", r"\mathrm{i}"),
            (r"3+4\mathrm{i}", r"4+3\mathrm{i}"), (r"\mathrm{e}^{-1}", r"\mathrm{e}"),
            (r"\mathit{x}+1", r"\mathit{y}+1"), (r"\mathbf{12}", r"\mathbf{21}"),
        ],
    ),
    "degrees in functions": (
        [
            (r"\frac12", r"\cos 60^\circ"), (r"\frac12", r"\sin 30^{\circ}"),
            ("1", r"\tan 45^\circ"), (r"\cos 60^\circ", "0.5"),
            (r"\frac{\sqrt3}{2}", r"\sin(60^\circ)"), (r"\sin 70^\circ", r"\cos 20^\circ"),
            (r"2\sin 10^\circ", r"2\cos 80^\circ"), (r"\frac{3}{4}", r"\sin^2 60^\circ"),
            (r"\tan 60°", r"\sqrt3"), (r"\cot 30\degree", r"\sqrt3"),
            (r"\cos(30^\circ+30^\circ)", r"\frac12"), (r"60^\circ", "60"),
            (r"4\sin 20^\circ \cos 20^\circ", r"2\sin 40^\circ"),
            (r"\sin{45^\circ}", r"\frac{\sqrt2}{2}"), (r"\cos 60\text{ degrees}", "1/2"),
        ],
        [
            (r"\frac12", r"\cos 30^\circ"), (r"\frac12", r"\cos 60"), (r"\cos 60", r"\frac12"),
            ("1", r"\tan 45"), (r"\sin 70^\circ", r"\sin 20^\circ"),
            (r"\sin 70^\circ", r"\cos 70^\circ"), (r"2\sin 10^\circ", r"2\sin 10"),
            (r"60^\circ", r"61^\circ"), (r"\frac34", r"\sin^2 30^\circ"),
        ],
    ),
    "intervals and inequalities": (
        [
            ("[-2,7]", r"-2\le x\le 7"), (r"-2\le x\le 7", "[-2,7]"), ("(3,5)", "3<x<5"),
            ("[0,2)", r"0\leq x<2"), (r"(-\infty,3)", "x<3"), (r"(2,\infty)", "x>2"),
            (r"[2,\infty)", r"x \geq 2"),
            (r"(-\infty,-2)\cup(3,\infty)", r"x<-2 \text{ or } x>3"),
            (r"x<-2 \text{ or } x>3", r"(-\infty,-2)\cup(3,\infty)"),
            (r"(-\infty,1]\cup[4,\infty)", r"x\le 1\text{ or }x\ge4"), ("[-2,7]", r"x\in[-2,7]"),
            ("[-2,7]", r"7\ge x\ge -2"), ("[-2,7]", r"\{x \mid -2\le x\le 7\}"),
            ("(0,1)", r"\{x\in\mathbb{R}: 0<x<1\}"), (r"[\frac12,\infty)", r"k\ge \frac12"),
            (r"(0,9)\cup(9,36)", r"(9,36)\cup(0,9)"),
            ("1<x<3", "3>x>1"), ("1<x<3", r"x>1\text{ and }x<3"),
            (r"(0,1)\cup(1,\infty)", r"x>0, x\neq 1"), ("|x|<3", "-3<x<3"),
            (r"x>0, x\neq1", r"(0,1)\cup(1,\infty)"), (r"|x|\le 2", r"2\ge x\ge -2"),
        ],
        [
            ("[-2,7]", r"-2<x\le 7"), ("[-2,7]", r"-2\le x\le 8"), ("(3,5)", r"3\le x\le5"),
            ("[0,2)", r"0\le x\le 2"), (r"(-\infty,3)", "x>3"), (r"(-\infty,3)", r"x\le 3"),
            (r"(-\infty,-2)\cup(3,\infty)", r"x<-2 \text{ or } x\ge3"),
            (r"(-\infty,-2)\cup(3,\infty)", "-2<x<3"), ("[-2,7]", "[-2,7)"), ("[-2,7]", "-2,7"),
            (r"[2,\infty)", r"x\ge 3"),
            ("1<x<3", r"3>x\ge1"), ("1<x<3", r"x>1\text{ and }x<4"),
            ("1<x<3", r"x>1\text{ and }y<3"), (r"(-\infty,1)\cup(2,\infty)", r"x<1\text{ or }y>2"),
            (r"(-\infty,1)\cup(2,\infty)", r"x<1\text{ and }x>2"),
            (r"(0,1)\cup(1,\infty)", r"x>0, x\neq 2"),
        ],
    ),
    "choices with a value": (
        [
            ("12", r"\textbf{(B)}\ 12"), ("12", r"\text{(a) }12"), ("12", r"\text{(B) }12"),
            ("12", "(B) 12"), ("12", "B. 12"), (r"\frac{3}{4}", r"\textbf{(C) }\frac{3}{4}"),
            (r"5\pi", r"\mathrm{(D)}\ 5\pi"), ("12", r"\textbf{(B) 12}"),
            (r"2+\sqrt3", r"\text{(E)}\quad 2+\sqrt{3}"), ("1,2", r"\textbf{(A)}~1,2"),
            ("12", r"\text{B) }12"), (r"\textbf{(B)}\ 12", "12"), (r"\textbf{(B)}\ 12", "B"),
            (r"25\%", r"\text{(D) }25\%"), ("12", r"\text{B. }12"), ("12", r"\textbf{B}: 12"),
            ("A, C", r"\text{A and C}"), ("B", r"\text{Option B}"),
            ("B", r"\text{The answer is B}"), (r"(\text{H})", "H"),
            ("7", r"\text{The answer is 7}"), ("m=7", r"\text{The answer is }m=7"),
        ],
        [
            ("12", r"\textbf{(B)}\ 13"), ("12", r"\text{(a) }21"), ("12", r"\textbf{(B)}"),
            ("12", "(B) 1"), (r"\frac34", r"\textbf{(C) }\frac{4}{3}"),
            (r"\textbf{(B)}\ 12", r"\textbf{(C)}\ 12"), (r"\textbf{(B)}\ 12", "C"),
            ("B", r"\textbf{(C)}\ 12"), ("12", r"\text{(a) }12x"), ("12", "B12"),
            ("B", r"\text{Option C}"), (r"(\text{H})", "G"),
            ("7", r"\text{The answer is 8}"), ("7", r"\text{The answer is not 7}"),
            ("7", r"\text{It is less than 7}"), ("A, C", r"\text{A and D}"),
        ],
    ),
    "units, bare and in text": (
        [
            ("10", "10 weeks"), ("245 yd.", "245"), ("245", "245 yd."),
            (r"7\text{ minutes and }5\text{ seconds}", "7 minutes and 5 seconds"),
            ("7 minutes and 5 seconds", r"7\text{ minutes and }5\text{ seconds}"),
            ("10", "10 days"), ("15 mph", "15"), ("3.5", "3.5 hours"), ("12", "12 students"),
            ("50", "50 km/h"), (r"50\text{ km/h}", "50 km/h"), ("8", r"8\text{ sq. units}"),
            ("36", "36 square units"), ("6 ft", "6 feet"),
            (r"100\text{ cm}^2", r"100\text{ square centimeters}"), ("24", "24 inches"),
            (r"\frac12", "1/2 hour"), (r"5\frac12", r"5\frac12\text{ cups}"),
            (r"16\pi", r"16\pi cm"), (r"9.8\ \mathrm{m/s^2}", "9.8"),
            ("10 weeks", r"10\text{ weeks}"), ("60 mph", r"60\text{ miles per hour}"),
            (r"5\text{ m}", r"500\text{ cm}"), ("30 cents", r"\$0.30"), (r"2\text{ dozen}", "24"),
            (r"75\ \mathrm{cm}", r"75\text{ centimeters}"),
        ],
        [
            ("10", "11 weeks"), ("245 yd.", "254"), ("245 yd.", "245 ft"),
            (r"30\text{ m}", r"30\text{ s}"),
            (r"\$5", r"5\text{ euros}"), ("10 weeks", "10 days"),
            ("7 minutes and 5 seconds", "7 minutes and 6 seconds"),
            ("7 minutes and 5 seconds", "5 minutes and 7 seconds"),
            ("7 minutes and 5 seconds", "7 minutes"), ("15 mph", "15 km/h"),
            (r"5\text{ m}", r"5\text{ cm}"), (r"100\text{ cm}^2", r"100\text{ cm}^3"),
            ("30 cents", r"\$30"), (r"16\pi\text{ cm}", r"16\pi\text{ m}"),
            ("24 inches", "24 feet"), ("10", "10 or more"), ("10", r"10\text{ or less}"),
        ],
    ),
    "names of arguments, empty sets, imaginary units": (
        [
            ("f(x)=x+1", "f(t)=t+1"), ("y=x+1", "f(x)=x+1"), ("f(x)=x+1", "y=x+1"),
            ("f(x)=x^2-1", "f(n)=n^2-1"), ("g(t)=2t", "g(x)=2x"), ("x+1", "f(x)=x+1"),
            ("f(x)=x+1", "x+1"), ("P(x)=x^3-x", "P(t)=t(t-1)(t+1)"),
            (r"f(x)=\sin x", r"f(u)=\sin u"), (r"\emptyset", r"\varnothing"),
            (r"\varnothing", r"\{\}"), (r"\emptyset", "∅"), ("1+2i", "i(2-i)"), ("-1", "i^2"),
            ("2i", "(1+i)^2"), ("3-i", "-i(1+3i)"), ("5", "(2+i)(2-i)"),
            (r"\frac{1+i}{2}", r"\frac{1}{1-i}"), ("a+bi", "bi+a"), ("y=2x+1", "f(t)=2t+1"),
            ("a_n=2n+1", "a_k=2k+1"), ("f(x)=x", r"f(x)=x\text{ for all }x"),
            (r"f(x)=0,f(x)=3x\text{ }\forall x", "f(x)=0, f(x)=3x"),
            ("f(x)=x", r"f(x)=x,\ \forall x\in\mathbb{R}"),
            (r"\emptyset", "Ø"), (r"\emptyset", r"\text{no solution}"),
            (r"\text{no solution}", r"\text{No real solutions}"),
        ],
        [
            ("f(x)=x+1", "f(t)=t-1"), ("f(x)=x+1", "f(t)=x+1"), ("y=x+1", "f(x)=x+2"),
            ("f(x)=x^2", "f(x)=x^3"), ("f(x)=x+1", "f(t)=t+x"), ("1+2i", "i(2+i)"),
            ("2i", "(1-i)^2"), ("1", "i^2"), (r"\emptyset", r"\{0\}"), (r"\emptyset", "0"),
            ("5", "(2+i)(2+i)"), ("f(x)=x+1", "g(x)=x+2"),
            ("a_n=n^2", "a_k=n^2"), ("a_1=2", "a_2=2"),
            ("v_x=3t", "v_y=3t"), ("f(x)=x", r"f(x)=2x\text{ for all }x"),
            ("f(x)=x", r"f(x)=x\text{ for all }x>0"),
            (r"\text{no solution}", r"\text{one solution}"),
            (r"\emptyset", r"\text{infinitely many solutions}"),
        ],
    ),
    "nothing to read, or too much to compute": (
        [
        ],
        [
            ("3", "?"), ("3", ""), ("3", "9^{9^{9^9}}"), ("3", "9**9**9**9"),
            ("3", "(10^{10})!!!"), ("3", r"\text{?}"), ("3", r"\frac{1}{}"), ("3", r"\dots"),
            ("3", "..."), ("3", r"\int_0^1 x^{x^x} dx"), ("3", "1e999999999"),
            ("3", r"\sum_{k=1}^{10^{12}} \frac{1}{k}"), ("3", r"\prod_{k=1}^{10^9} k"),
            ("3", r"\binom{10^{10}}{5\cdot 10^9}"), ("3", "x^{10^{10}} (x+1)^{10^9}"),
            ("3", "2^{2^{2^{2^{2^2}}}}"), ("x+1", "(x+1)^{9^{9^9}}"), ("3", r"\text{unknown}"),
            ("3", "@@"), ("3", r"\sqrt{}"), ("3", "e^{e^{e^{e^e}}}"),
            ("3", r"\tan^{-1}(9^{9^9})"), ("3", r"\frac{1}{0}"),
            ("3", r"\lim_{x \to 0} \frac{\sin x}{x^{99}}"), ("3", "1000000!"),
            ("3", "x^{999999999}"), ("x^2+1", "x^{x^{x^{x^{x}}}}"),
            ("x+1", "(x+1)^{500000}"), ("x", r"\binom{n}{99999}"),
            (r"a=0\text{ and }ab\ne 0", r"a=0\text{ and }ab\ne 1"), ("3", "n!!!!!"),
        ],
    ),
    "a factor d, and differentials": (
        [
            ("8dt", "8td"), ("adx", "dxa"), ("ad", "da"), (r"d\sqrt{2}", r"\sqrt2 d"),
            (r"\frac{dt^2}{2}", r"\frac12 t^2d"), (r"d\cdot t", "td"), (r"2\pi d r", r"2\pi rd"),
            ("2dz+1", "1+2zd"), (r"\frac{d\pi}{4}", r"\frac14\pi d"), ("d(a+b)", "da+db"),
            ("2^{dt}", "2^{td}"), (r"8d\theta", r"8\theta d"), (r"\frac{ad}{bc}", r"\frac{da}{cb}"),
            (r"\frac{dy}{dx}=x", r"x=\frac{dy}{dx}"), (r"x\,dy=y\,dx", "xdy=ydx"),
        ],
        [
            ("8dt", "8d"), ("8dt", "8t"), ("8dt", "8dx"), ("ad", "a"), (r"d\sqrt{2}", r"d\sqrt{3}"),
            (r"d\cdot t", "d+t"), (r"x\,dy=y\,dx", r"x\,dx=y\,dy"), ("2dz+1", "2d+1"),
            (r"\frac{dy}{dx}=x", r"\frac{dx}{dy}=x"), (r"\frac{dy}{dx}", "0"),
            (r"\frac{dy}{dx}=y", r"\frac{dz}{dx}=y"), ("v_{d}t", "vdt"),
        ],
    ),
    "large, small and complex values": (
        [
            (r"2^{2020}", r"4^{1010}"), (r"10^{50}\sqrt{2}", r"\sqrt{2}\cdot 10^{50}"),
            (r"100!", r"100 \cdot 99!"), (r"2^{-2023}", r"\frac{1}{2^{2023}}"),
            (r"3^{100}-1", r"(3^{50}-1)(3^{50}+1)"), ("z=2+3i", "3i+2"), ("(1+i, 2)", "(i+1,2)"),
            (r"|x|", r"\sqrt{x^2}"), (r"\sqrt{x}\sqrt{y}", r"\sqrt{xy}"),
        ],
        [
            (r"2^{2020}", r"4^{1011}"), (r"10^{50}\sqrt{2}", r"10^{51}\sqrt{2}"),
            (r"100!", r"99!"), (r"2^{-2023}", r"2^{-2024}"), (r"3^{100}-1", r"3^{100}"),
            ("z=2+3i", "2-3i"), ("x", "|x|"), ("0", r"10^{-9}"), ("x^2+1=0", "x^2+2=0"),
            ("x^2+y^2=1", "x^2+y^2=2"),
        ],
    ),
    "alternatives and lists": (
        [
            (r"\frac32 \text{ or } 1.5", "1.5"), (r"\text{B,C}", "C, B"),
            (r"\frac12, \frac13", r"\frac13 \text{ OR } \frac12"), ("11^{\\text{th}}", "11"),
            (r"1,2,\ldots,9", "1,2,...,9"), ("1, 2, 3", r"\text{1, 2, and 3}"),
            (r"\frac{x+1}{x-1}", r"x+1 \over x-1"), ("1,1,2", "2,1,1"), (r"\text{(B)}", "(B) 5"),
        ],
        [
            (r"\frac32 \text{ or } 2.5", "1.5"), (r"\text{B,C}", "B"), ("5", r"5 \pm 1"),
            (r"\text{(B)}", "(B), (C)"), (r"\text{(B)}", r"\text{(B) or (C)}"), ("B", "B: C"),
            (r"60^\circ,60^\circ,60^\circ", r"60^\circ,60^\circ"), ("1,1,2", "1,2"),
            (r"\text{(D)}", "7.47"), ("12", r"\text{between } 12 \text{ and } 13"),
            (r"1,2,\ldots,9", "1,2,...,8"), ("3", r"x \in \{1, 3\}"), ("5", "x>5"),
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
