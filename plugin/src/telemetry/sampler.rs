//! Reads all GPUs at an interval, on a thread of its own with its own NVML: a call that hangs here stops neither the health
//! checks nor the devices.
//!
//! A thread cannot be ended while a call of the driver hangs. The sampler leaves it to that call, and a new thread reads the other
//! GPUs. A GPU with a hanging call is not read again before that call returns, so there are at most as many threads as GPUs,
//! and one more.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gantry_config::Config;
use gantry_runtime::LogThrottle;
use gantry_topology::GpuUuid;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::reader::{GpuSample, Reader};
use crate::nvml::{CallTrace, Nvml, NvmlError};
use crate::root;

/// Intervals of the sampler.
#[derive(Debug, Clone, Copy)]
pub struct SamplerTiming {
    /// From the end of a round to the next one.
    pub interval: Duration,
    /// From the first round to the second, from which rates are known.
    pub first: Duration,
    /// How long the reading of one GPU may take before the others go on without it.
    pub hung_after: Duration,
}

impl SamplerTiming {
    pub fn every(interval: Duration) -> Self {
        let hung_after = interval.clamp(Duration::from_secs(2), Duration::from_secs(10));
        Self { interval, first: interval.min(Duration::from_secs(1)), hung_after }
    }

    /// Age beyond which a sample is not published: the GPU does not respond.
    fn stale_after(&self) -> Duration {
        self.interval * 2 + self.hung_after
    }
}

/// What the sampler reads from.
#[derive(Debug, Clone)]
pub struct SamplerSource {
    /// Path or soname of NVML.
    pub library: PathBuf,
    /// Its container driver root is searched first.
    pub config: watch::Receiver<Arc<Config>>,
}

/// The last samples. Clones share them.
#[derive(Debug, Clone)]
pub struct Samples(Arc<SharedSamples>);

#[derive(Debug)]
struct SharedSamples {
    timing: SamplerTiming,
    state: Mutex<State>,
    stopped: Condvar,
}

#[derive(Debug, Default)]
struct State {
    samples: BTreeMap<GpuUuid, GpuSample>,
    /// GPUs that are being read, by NVML index.
    reading: BTreeMap<u32, RunningReading>,
    /// Number of the thread that reads; earlier ones end as soon as their call returns.
    thread: u64,
    stop: bool,
    /// Whether NVML is to be closed.
    closed: bool,
}

#[derive(Debug, Clone)]
struct RunningReading {
    since: Instant,
    thread: u64,
    call: CallTrace,
}

impl Samples {
    pub fn new(timing: SamplerTiming) -> Self {
        Self(Arc::new(SharedSamples { timing, state: Mutex::default(), stopped: Condvar::new() }))
    }

    /// The present samples, in the order of NVML's indices. A GPU that does not respond has none.
    pub fn now(&self) -> Vec<GpuSample> {
        let limit = self.0.timing.stale_after();
        let state = self.state();
        let mut samples: Vec<GpuSample> =
            state.samples.values().filter(|sample| sample.taken.elapsed() <= limit).cloned().collect();
        samples.sort_by_key(|sample| sample.index);
        samples
    }

    /// Age of the last sample of each GPU that was ever read.
    pub fn ages(&self) -> Vec<(GpuUuid, Duration)> {
        let state = self.state();
        state.samples.iter().map(|(uuid, sample)| (uuid.clone(), sample.taken.elapsed())).collect()
    }

    /// Keeps NVML closed, or opens it again. A call under way is completed before.
    pub fn keep_nvml_closed(&self, closed: bool) {
        self.state().closed = closed;
        self.0.stopped.notify_all();
    }

    /// Runs the sampler until `shutdown`.
    ///
    /// # Errors
    /// When the operating system refuses the first thread.
    pub async fn run(self, source: SamplerSource, shutdown: CancellationToken) -> io::Result<()> {
        let _stop = StopOnDrop(self.clone());
        self.spawn(source.clone(), 0)?;
        let period = self.0.timing.hung_after.min(Duration::from_secs(1));
        while shutdown.run_until_cancelled(tokio::time::sleep(period)).await.is_some() {
            let Some((thread, index, call)) = self.replace_hung() else { continue };
            tracing::warn!(
                gpu = index,
                "NVML does not return from {call}: the metrics of this GPU are missing until it does; see dmesg for NVRM and Xid"
            );
            if let Err(error) = self.spawn(source.clone(), thread) {
                tracing::warn!("no thread can be started, so the metrics of the GPUs are missing: {error}");
            }
        }
        Ok(())
    }

    fn spawn(&self, source: SamplerSource, thread: u64) -> io::Result<()> {
        let samples = self.clone();
        let builder = std::thread::Builder::new().name("telemetry".to_owned());
        builder.spawn(move || samples.read_rounds(&source, thread)).map(drop)
    }

    /// If the present thread hangs at a GPU: the number of the next one, the GPU and the call.
    fn replace_hung(&self) -> Option<(u64, u32, String)> {
        let limit = self.0.timing.hung_after;
        let mut state = self.state();
        let present = state.thread;
        let (index, reading) = state
            .reading
            .iter()
            .find(|(_, reading)| reading.thread == present && reading.since.elapsed() >= limit)?;
        let call = reading.call.now().map_or_else(|| "a call".to_owned(), |call| call.to_string());
        let index = *index;
        state.thread += 1;
        Some((state.thread, index, call))
    }

    /// The thread: loads NVML and reads round after round. Loads it again after an error of NVML as a whole.
    fn read_rounds(&self, source: &SamplerSource, thread: u64) {
        let mut log = LogThrottle::default();
        let trace = CallTrace::default();
        while self.wait_while_closed(thread) {
            let folder = source.config.borrow().container_driver_root.clone();
            let library = root::find_library(&source.library, &folder);
            let session =
                Nvml::load_traced(&library, &trace).and_then(|nvml| self.session(&nvml, &trace, thread));
            match session {
                Ok(()) => continue,
                // The health checks report it.
                Err(error) if log.should_log(&error.to_string(), Instant::now()) => {
                    tracing::debug!("the metrics of the GPUs cannot be read: {error}");
                }
                Err(_) => {}
            }
            if !self.wait(self.0.timing.interval, thread) {
                return;
            }
        }
    }

    /// Reads until this thread is to end, NVML is to be closed, or NVML fails as a whole.
    fn session(&self, nvml: &Nvml, trace: &CallTrace, thread: u64) -> Result<(), NvmlError> {
        let mut reader = Reader::new(nvml);
        let mut pause = self.0.timing.first;
        loop {
            let count = nvml.device_count()?;
            self.state().samples.retain(|_, sample| sample.index < count);
            for index in 0..count {
                if !self.begin(index, thread, trace) {
                    continue;
                }
                let read = reader.read(index);
                let goes_on = self.end(index, thread, read.as_ref().ok());
                match read {
                    _ if !goes_on => return Ok(()),
                    Err(error) if error.is_driver_gone() => return Err(error),
                    Err(error) => {
                        tracing::debug!(gpu = index, "the metrics of this GPU cannot be read: {error}");
                    }
                    Ok(_) => {}
                }
            }
            if !self.wait(pause, thread) || self.state().closed {
                return Ok(());
            }
            pause = self.0.timing.interval;
        }
    }

    /// Records that the thread reads a GPU. False if a hanging call of an earlier thread still does.
    fn begin(&self, index: u32, thread: u64, call: &CallTrace) -> bool {
        let mut state = self.state();
        if state.reading.contains_key(&index) {
            return false;
        }
        state.reading.insert(index, RunningReading { since: Instant::now(), thread, call: call.clone() });
        true
    }

    /// Records the sample. False if the thread is to end, or NVML is to be closed.
    fn end(&self, index: u32, thread: u64, sample: Option<&GpuSample>) -> bool {
        let mut state = self.state();
        state.reading.remove(&index);
        match sample {
            Some(sample) => _ = state.samples.insert(sample.uuid.clone(), sample.clone()),
            // A GPU that cannot be read has no values.
            None => state.samples.retain(|_, known| known.index != index),
        }
        state.thread == thread && !state.stop && !state.closed
    }

    /// Waits while NVML is to be closed. False if the thread is to end.
    fn wait_while_closed(&self, thread: u64) -> bool {
        let waits = |state: &mut State| state.thread == thread && !state.stop && state.closed;
        let waited = self.0.stopped.wait_while(self.state(), waits);
        let state = waited.unwrap_or_else(PoisonError::into_inner);
        state.thread == thread && !state.stop
    }

    /// Waits, until NVML is to be closed. False if the thread is to end.
    fn wait(&self, time: Duration, thread: u64) -> bool {
        let state = self.state();
        let waits = |state: &mut State| state.thread == thread && !state.stop && !state.closed;
        let waited = self.0.stopped.wait_timeout_while(state, time, waits);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.thread == thread && !state.stop
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the threads when dropped, without waiting.
struct StopOnDrop(Samples);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.state().stop = true;
        self.0.0.stopped.notify_all();
    }
}
