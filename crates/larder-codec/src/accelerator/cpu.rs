//! CPU as an accelerator: requests wait in a queue, and polling encodes the next one.

use std::collections::VecDeque;
use std::num::NonZero;

use super::{Accelerator, AcceleratorOpenError, EncodeRequest, Instance, InstanceStatistics};
use crate::batch::{Encoder, Method};
use crate::isal::{self, LoadError};

pub(super) struct Cpu;

pub(super) struct Igzip;

/// Methods that need no other library.
const METHODS: [Method; 5] = [Method::Lz4, Method::Lz4Fast, Method::WordsLz4, Method::ZstdFast, Method::Zstd];

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

impl Accelerator for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn is_device(&self) -> bool {
        false
    }

    fn methods(&self) -> &[Method] {
        &METHODS
    }

    fn instances(&self) -> usize {
        threads()
    }

    fn open(&self) -> Result<Box<dyn Instance>, AcceleratorOpenError> {
        Ok(Box::new(CpuInstance::new(self.name(), &METHODS)))
    }
}

impl Igzip {
    pub(super) fn find() -> Result<Self, AcceleratorOpenError> {
        match isal::loaded() {
            Ok(_) => Ok(Self),
            Err(LoadError::Absent(why)) => {
                Err(AcceleratorOpenError::Library { library: isal::LIBRARY, why: why.clone() })
            }
            Err(LoadError::Incompatible(why)) => {
                Err(AcceleratorOpenError::Incompatible { library: isal::LIBRARY, why })
            }
        }
    }
}

impl Accelerator for Igzip {
    fn name(&self) -> &'static str {
        "igzip"
    }

    fn is_device(&self) -> bool {
        false
    }

    fn methods(&self) -> &[Method] {
        &[Method::Deflate]
    }

    fn instances(&self) -> usize {
        threads()
    }

    fn open(&self) -> Result<Box<dyn Instance>, AcceleratorOpenError> {
        Ok(Box::new(CpuInstance::new(self.name(), &[Method::Deflate])))
    }
}

pub(super) struct CpuInstance {
    name: &'static str,
    methods: &'static [Method],
    encoder: Encoder,
    queue: VecDeque<Box<EncodeRequest>>,
    statistics: InstanceStatistics,
}

impl CpuInstance {
    /// Queue length; a longer queue would only increase the wait.
    const QUEUE_MAX: usize = 4;

    pub(super) fn new(name: &'static str, methods: &'static [Method]) -> Self {
        Self {
            name,
            methods,
            encoder: Encoder::new(),
            queue: VecDeque::with_capacity(Self::QUEUE_MAX),
            statistics: InstanceStatistics::default(),
        }
    }

    /// Encodes a request that was not submitted.
    pub(super) fn encode_now(&mut self, request: &mut EncodeRequest) {
        request.encode(&mut self.encoder);
        self.statistics.submitted += 1;
        self.statistics.record_completed(request);
    }
}

impl Instance for CpuInstance {
    fn name(&self) -> &'static str {
        self.name
    }

    fn supports(&self, method: Method) -> bool {
        self.methods.contains(&method)
    }

    fn submit(&mut self, request: Box<EncodeRequest>) -> Result<(), Box<EncodeRequest>> {
        if self.queue.len() == Self::QUEUE_MAX {
            self.statistics.refused += 1;
            return Err(request);
        }
        self.statistics.submitted += 1;
        self.queue.push_back(request);
        Ok(())
    }

    fn poll(&mut self) -> Option<Box<EncodeRequest>> {
        let mut request = self.queue.pop_front()?;
        request.encode(&mut self.encoder);
        self.statistics.record_completed(&request);
        Some(request)
    }

    fn in_flight(&self) -> usize {
        self.queue.len()
    }

    fn statistics(&self) -> InstanceStatistics {
        self.statistics
    }
}
