"""Weight bus: proven weight updates from the learner to every engine, over numbered epochs."""

from weight_bus.errors import BusClosed, NonFiniteWeights, RemovedFromBus, TransportError, WeightBusError
from weight_bus.offer import Event, PublishReport
from weight_bus.publisher import Publisher
from weight_bus.subscriber import Subscriber
