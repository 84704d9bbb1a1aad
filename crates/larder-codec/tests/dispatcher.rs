//! Tests of the dispatcher with instances that are full, that fail, or that do not make the requested method.

use std::collections::VecDeque;
use std::sync::Arc;

use larder_codec::PAGE;
use larder_codec::accelerator::{
    Dispatcher, EncodeOutcome, EncodeRequest, Instance, InstanceStatistics, PageBuffer, RequestPool, SoftwarePath, find,
};
use larder_codec::batch::{Decoder, Method};
use larder_codec::measure::MemoryContent;

/// Device that accepts one request at a time and always fails.
#[derive(Default)]
struct Broken {
    queue: VecDeque<Box<EncodeRequest>>,
    statistics: InstanceStatistics,
}

impl Instance for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn supports(&self, method: Method) -> bool {
        method == Method::Deflate
    }

    fn submit(&mut self, request: Box<EncodeRequest>) -> Result<(), Box<EncodeRequest>> {
        if !self.queue.is_empty() {
            return Err(request);
        }
        self.statistics.submitted += 1;
        self.queue.push_back(request);
        Ok(())
    }

    fn poll(&mut self) -> Option<Box<EncodeRequest>> {
        let mut request = self.queue.pop_front()?;
        request.mark_failed();
        self.statistics.completed += 1;
        self.statistics.failed += 1;
        Some(request)
    }

    fn in_flight(&self) -> usize {
        self.queue.len()
    }

    fn statistics(&self) -> InstanceStatistics {
        self.statistics
    }
}

fn memory() -> Arc<PageBuffer> {
    let mut buffer = PageBuffer::new(8);
    let text = MemoryContent::Text.generate(buffer.len(), 1);
    buffer.copy_from_slice(&text);
    Arc::new(buffer)
}

fn request(pool: &mut RequestPool, memory: &Arc<PageBuffer>, tag: u64, method: Method) -> Box<EncodeRequest> {
    let mut request = pool.take().expect("there is one");
    request.fill(tag, method, Arc::clone(memory), std::iter::once(0..8 * PAGE), 7 * PAGE);
    request
}

/// A batch that a device fails on is encoded by the CPU, and after repeated failures the device is not used any more.
#[test]
fn failing_device_is_replaced_by_cpu() {
    let memory = memory();
    let mut pool = RequestPool::new(2);
    let mut dispatcher = Dispatcher::new(vec![Box::new(Broken::default())]);
    let mut decoder = Decoder::new();
    for tag in 0..10 {
        let request = request(&mut pool, &memory, tag, Method::Deflate);
        assert!(dispatcher.submit(request).is_ok());
        let request = dispatcher.poll().expect("it is done");
        assert!(matches!(request.outcome(), EncodeOutcome::Encoded(_)));
        assert_eq!(request.tag(), tag);
        let mut back = vec![0; 8 * PAGE];
        decoder.decode(Method::Deflate, request.output(), &mut back).expect("decodes");
        assert!(back == memory[..]);
        pool.recycle(request);
    }
    let statistics: Vec<_> = dispatcher.statistics().collect();
    assert_eq!((statistics[0].statistics.failed, statistics[0].is_enabled), (3, false));
    assert_eq!(statistics[1].statistics.completed, 10);
}

/// A full instance returns the request; other methods go to the CPU.
#[test]
fn full_instance_returns_request() {
    let memory = memory();
    let mut pool = RequestPool::new(2);
    let mut dispatcher = Dispatcher::new(vec![Box::new(Broken::default())]);
    assert!(dispatcher.submit(request(&mut pool, &memory, 1, Method::Deflate)).is_ok());
    let refused = dispatcher.submit(request(&mut pool, &memory, 2, Method::Deflate)).expect_err("it is full");
    assert_eq!((refused.tag(), dispatcher.in_flight()), (2, 1));
    assert!(pool.take().is_none(), "a pool is bounded");
    pool.recycle(refused);
    // Methods that the instance does not make are encoded by the CPU.
    let lz4 = request(&mut pool, &memory, 3, Method::Lz4);
    assert!(dispatcher.submit(lz4).is_ok());
    let tags: Vec<u64> = std::iter::from_fn(|| dispatcher.poll()).map(|request| request.tag()).collect();
    assert_eq!(tags, [1, 3]);
}

#[test]
fn instances_take_turns() {
    let memory = memory();
    let mut pool = RequestPool::new(12);
    let cpu = &find(SoftwarePath::Disabled).available[0];
    assert_eq!(cpu.name(), "cpu");
    let mut dispatcher = Dispatcher::new((0..3).map(|_| cpu.open().expect("opens")).collect());
    for tag in 0..12 {
        let lz4 = request(&mut pool, &memory, tag, Method::Lz4);
        assert!(dispatcher.submit(lz4).is_ok());
    }
    let taken: Vec<u64> = dispatcher.statistics().map(|one| one.statistics.submitted).collect();
    assert_eq!(taken, [4, 4, 4, 0]);
    let mut tags: Vec<u64> = std::iter::from_fn(|| dispatcher.poll()).map(|request| request.tag()).collect();
    tags.sort_unstable();
    assert_eq!(tags, (0..12).collect::<Vec<_>>());
}
