"""What the synthetic speakers say. Spaces in a Chinese sentence mark where a speaker may pause.

The last `HELD_OUT` sentences of each language are never trained on: the evaluation and the bundled clips use them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

HELD_OUT: Final = 18

_ZH: Final = """
今天 我们 去公园 散步吧
我不知道 他为什么 没有来
这件事情 真的 太让人 生气了
请你 把门 关上 好吗
明天 下午 可能会 下雨
他终于 完成了 那个 项目
我觉得 很累 想休息 一下
大家 都在 等你的 消息
昨天晚上 我看了 一部 老电影
你怎么能 这样 跟我 说话
谢谢你 一直 以来的 帮助
这个问题 我们 以后 再讨论
火车 八点半 从北京 出发
妈妈 在厨房里 做晚饭
孩子们 在操场上 踢足球
请问 去图书馆 怎么走
这本书 我已经 读了 三遍
外面的 风 刮得 很大
他把钥匙 忘在 办公室 里了
会议 改到 星期四 上午
我想 买一张 去上海的 车票
窗外的 桂花 已经 开了
医生 让他 每天 早点睡觉
这家 餐馆的 面条 很好吃
我们 应该 先听听 她的意见
手机 没电了 等我 充一下
他小时候 住在 海边的 村子里
考试 成绩 下周一 公布
别担心 事情 会慢慢 好起来的
你把 文件 发到 我的邮箱
老师 表扬了 全班的 同学
奶奶 喜欢 在院子里 种花
飞机 晚点了 两个 小时
我从来 没有 见过 这么大的雪
周末 我们 一起 去爬山
这条路 正在 修 请绕行
他唱歌 唱得 比以前 好多了
请大家 安静 会议 马上开始
我把 你的话 都记 下来了
超市 门口 排着 很长的队
爷爷 每天早上 都去 打太极拳
你说的 那个地方 我没 去过
小猫 躲在 沙发 下面 睡觉
这道题 的答案 其实 很简单
我们 坐地铁 去 会快一点
他为 这场比赛 准备了 一年
今年的 苹果 又大 又甜
对不起 我刚才 没有 听清楚
请在 这里 签上 您的名字
夏天的 晚上 星星 特别 亮
公司 决定 明年 搬到 南方
我姐姐 在医院 当 护士
路上 堵车 我会 晚到 十分钟
你有没有 听见 外面的 声音
邮局 就在 银行的 旁边
他一边 走路 一边 看手机
春节 我们 全家 一起 包饺子
这个 消息 来得 太突然了
麻烦您 把空调 开低 一点
我已经 在这里 等了 半天了
今晚的 月亮 又圆 又亮
他们 正在 讨论 新的 计划
雨停了 我们 可以 出发了
弟弟 把杯子 打碎 了
请把 音乐 的声音 调小
这座 老桥 有 三百年 历史
我 同意 你刚才 说的 办法
你 到家 以后 给我 打电话
湖面上 飘着 几只 小船
昨天的 作业 你写完 了吗
她第一次 一个人 出门 旅行
旧的 照片 都放在 箱子里
我们班 一共有 四十个 学生
商店 晚上 九点 就关门了
他 说话 总是 喜欢 开玩笑
这件 衣服 的颜色 很适合你
请你 再说 一遍 好不好
山上的 空气 比城里 新鲜
我打算 明年 学习 弹钢琴
邻居 送来了 一篮子 鸡蛋
报纸上 说 今年冬天 很冷
你们 先走 我 随后 就到
桌子上 放着 一杯 热茶
他 每个月 都给 家里 写信
我 忘记 带 雨伞了
下一站 是 人民 广场
这只 小狗 是谁 家的
请 保管好 您的 行李
我们 终于 看见 大海了
她 高兴得 跳了 起来
厨房里 传来 一阵 香味
我想 跟你 商量 一件事
公园里 有 很多人 在跳舞
他 昨天 修好了 那辆 自行车
菜市场 的鱼 非常 新鲜
请您 稍等 我去 问一下
这次 旅行 让我 难忘
天气 预报 说 周末 是晴天
"""

_EN: Final = """
we are going to the park today
I do not know why he did not come
this is really making me angry
please close the door behind you
it may rain tomorrow afternoon
he finally finished the whole project
I am tired and I want to rest
everyone is waiting for your news
how can you say such a thing to me
thank you for all of your help
the train leaves at half past eight
my mother is cooking dinner in the kitchen
the children are playing in the school yard
could you tell me the way to the library
I have read this book three times already
the wind outside is very strong tonight
he left his keys in the office again
the meeting has moved to Thursday morning
I would like a ticket to the city please
the doctor told him to sleep early
this restaurant makes wonderful noodles
we should listen to her opinion first
my phone is dead so wait a minute
he grew up in a village by the sea
the results will be announced on Monday
do not worry things will get better soon
send the document to my mailbox please
the teacher praised every student in class
my grandmother likes to grow roses
the flight was delayed for two hours
I have never seen so much snow before
let us climb the mountain this weekend
this road is closed so take another one
she sings much better than she used to
please be quiet the show is about to start
I wrote down everything that you said
there is a long line outside the shop
my grandfather goes for a walk every morning
I have never been to that place
the kitten is sleeping under the sofa
the answer to this question is quite simple
we will get there faster on the subway
they prepared a whole year for this match
the apples this year are big and sweet
sorry I did not hear what you said
please sign your name on this line
the stars are very bright in summer
the company will move south next year
my sister works as a nurse in town
I am stuck in traffic and will be late
did you hear that noise outside
the post office is next to the bank
he was walking and looking at his phone
the whole family gathers for the holiday
this news came as a great surprise
would you turn the heating down a little
I have been waiting here for an hour
the moon is round and bright tonight
they are talking about the new plan
the rain has stopped so we can go
my brother broke the blue glass
please turn the music down a bit
the old bridge is three hundred years old
I agree with what you said just now
call me when you get back home
a few small boats drifted on the lake
have you finished your homework yet
she is travelling alone for the first time
the old photographs are in that box
there are forty students in our class
the store closes at nine in the evening
he always likes to tell funny jokes
that colour looks very good on you
please say it again more clearly
the air in the hills is fresh and cool
I plan to learn the piano next year
our neighbour brought a basket of eggs
the paper says the winter will be cold
you go first and I will follow you
there is a cup of hot tea on the table
he writes a letter home every month
I forgot to bring my umbrella today
the next stop is the central square
whose little brown dog is this
please take good care of your luggage
we could finally see the ocean
she was so happy that she jumped up
a lovely smell came from the kitchen
there is something I want to discuss
many people are dancing in the garden
he repaired that old bicycle yesterday
the fish at the market is very fresh
please wait a moment while I ask
that journey was hard to forget
the forecast says it will be sunny
nobody answered when I knocked twice
"""


@lru_cache(maxsize=4)
def sentences(lang: str, held_out: bool) -> list[list[str]]:
    """The sentences of a language, each a list of units between which a speaker may pause."""
    lines = (_ZH if lang == "zh" else _EN).strip().splitlines()
    return [line.split() for line in (lines[-HELD_OUT:] if held_out else lines[:-HELD_OUT])]


def join(units: list[str], lang: str) -> str:
    """The units as written text."""
    return ("" if lang == "zh" else " ").join(units)
