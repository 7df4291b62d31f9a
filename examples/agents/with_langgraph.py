"""A sum by LangGraph, with a tool."""

import json
import re
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def calculator(expression: str) -> str:
    """Add two numbers."""
    return str(sum(int(number) for number in re.findall(r"\d+", expression)))


model = ChatOpenAI(model="policy").bind_tools([calculator])
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([calculator]))
graph.add_edge(START, "model").add_conditional_edges("model", tools_condition).add_edge("tools", "model")

row = json.loads(sys.stdin.readline())
said = graph.compile().invoke({"messages": row["prompt"]})["messages"][-1].content
print(json.dumps({"reward": float(said.strip() == row["ground_truth"])}))
