use gantry_topology::GpuUuid;

use super::*;
use crate::health::{Cause, Class, ClearedFault, Proof, Trouble};

fn uuid(name: &str) -> GpuUuid {
    format!("GPU-{name}").parse().unwrap()
}

fn gpu(name: &str) -> GpuName {
    uuid(name).into()
}

/// The problems of GPUs; a fatal Xid is 79.
fn diagnosis(troubles: &[(&str, Cause, &str)]) -> Diagnosis {
    Diagnosis {
        known: true,
        adopted: true,
        troubles: troubles
            .iter()
            .map(|(name, cause, reason)| Trouble {
                gpu: gpu(name),
                extent: Extent::Gpu,
                cause: *cause,
                xid: (*cause == XID).then_some(79),
                reason: (*reason).to_owned(),
            })
            .collect(),
        ..Diagnosis::default()
    }
}

const XID: Cause = Cause::Xid(Class::Fatal);

/// What the Event of Xid 79 adds.
const RESPONSE: &str = ". Response: drain the node and reboot it; replace the board if it repeats";

fn texts(events: &[Message]) -> Vec<String> {
    let text = |event: &Message| format!("{} {}", event.reason, event.note);
    events.iter().map(text).collect()
}

#[test]
fn busy_api_server_is_retried() {
    let answer = |code| {
        let status = kube::core::Status::failure("no", "reason").with_code(code);
        is_lasting(&kube::Error::Api(Box::new(status)))
    };
    assert!([403, 404, 422].into_iter().all(answer));
    assert!(![401, 409, 429, 500, 503].into_iter().any(answer));
}

#[test]
fn condition_follows_the_worst_reason_of_each_gpu() {
    let (early, late) = (Timestamp::from_second(1).unwrap(), Timestamp::from_second(2).unwrap());
    let healthy = condition(&diagnosis(&[]), &[], None, early);
    assert_eq!((healthy.type_.as_str(), healthy.status.as_str()), ("GPUHealthy", "True"));
    let unhealthy_gpus = diagnosis(&[
        ("a", Cause::Lost, "GPU lost"),
        ("a", XID, "Xid 79"),
        ("b", Cause::Uncorrected, "memory"),
    ]);
    let unhealthy = condition(&unhealthy_gpus, &[], Some(&healthy), late);
    assert_eq!((unhealthy.status.as_str(), unhealthy.reason.as_deref()), ("False", Some("GpuUnhealthy")));
    assert_eq!(reasons(&unhealthy_gpus).into_values().collect::<Vec<_>>(), ["Xid 79", "memory"]);
    assert_eq!(unhealthy.last_transition_time, Some(Time(late)));
    let same = condition(&unhealthy_gpus, &[], Some(&unhealthy), Timestamp::from_second(9).unwrap());
    assert_eq!(same.last_transition_time, Some(Time(late)), "its status stayed");
    assert!(!differs(&unhealthy, &same) && differs(&healthy, &same));
}

#[test]
fn change_is_reported_once_with_reason_and_proof() {
    let mut reported = LastReported::default();
    let start = Instant::now();
    let unhealthy_gpus = diagnosis(&[("a", XID, "Xid 79")]);
    assert_eq!(
        texts(&reported.events(&unhealthy_gpus, start)),
        [format!("GpuUnhealthy GPU-a: Xid 79{RESPONSE}")]
    );
    assert_eq!(texts(&reported.events(&unhealthy_gpus, start)), [""; 0]);
    let mut well = diagnosis(&[]);
    well.ended =
        vec![(1, ClearedFault { gpu: uuid("a"), reason: "Xid 79".to_owned(), proof: Proof::Responds })];
    assert_eq!(
        texts(&reported.events(&well, start + EVENT_INTERVAL_PER_GPU)),
        ["GpuRecovered GPU-a: no longer \"Xid 79\"; it was off the bus and responds again"]
    );
}

#[test]
fn event_of_an_xid_has_its_response_if_it_fits() {
    let uuid = "GPU-00000000-0000-0000-0000-000000000000";
    let table = Table::built_in();
    for xid in table.all().iter().filter(|xid| xid.class.is_unhealthy()) {
        let text = with_response(format!("{uuid}: {}", table.describe(xid.code)), Some(xid.code));
        assert!(text.ends_with(xid.response), "Xid {}: {text}", xid.code);
        assert!(text.len() <= MAX_MESSAGE, "Xid {}: {} bytes", xid.code, text.len());
    }
    let long = "x".repeat(MAX_MESSAGE - 10);
    assert_eq!(with_response(long.clone(), Some(79)), long);
    assert_eq!(with_response("Xid 13".to_owned(), Some(13)), "Xid 13");
    assert_eq!(with_response("GPU lost".to_owned(), None), "GPU lost");
}

#[test]
fn flapping_gpu_is_reported_rarely() {
    let mut reported = LastReported::default();
    let start = Instant::now();
    let (unhealthy_gpus, well) = (diagnosis(&[("a", Cause::Lost, "GPU lost")]), diagnosis(&[]));
    let mut events = 0;
    for second in 0..120 {
        let now = if second % 2 == 0 { &unhealthy_gpus } else { &well };
        events += reported.events(now, start + Duration::from_secs(second)).len();
    }
    assert!((4..=5).contains(&events), "{events}");
    // Another GPU is reported at once, and the delayed Event later.
    let end = start + Duration::from_secs(120);
    let both = diagnosis(&[("a", XID, "Xid 79"), ("b", XID, "Xid 79")]);
    reported.at.insert((gpu("a"), Problem::Fault), end);
    assert_eq!(texts(&reported.events(&both, end)), [format!("GpuUnhealthy GPU-b: Xid 79{RESPONSE}")]);
    assert_eq!(reported.later(&both, end), Some(EVENT_INTERVAL_PER_GPU));
}

/// A kubelet with another root: the plugin waits for its socket for ever.
#[test]
fn lasting_problem_of_serving_is_an_event() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let waits = || (Reason::NotRegistered, "waiting for kubelet's socket".to_owned());
    let serves = || (Reason::Serving, Reason::Serving.text().to_owned());
    let mut report = ServingReport::default();
    assert!(report.event(serves(), start).is_none(), "nothing was wrong");
    assert!(report.event(waits(), after(1)).is_none(), "a restart of kubelet takes a moment");
    assert_eq!(report.later(after(2)), Some(Duration::from_secs(9)));
    let event = report.event(waits(), after(11)).unwrap();
    assert!(event.warning);
    assert_eq!(texts(&[event]), ["NotRegistered waiting for kubelet's socket"]);
    assert!(report.event(waits(), after(1000)).is_none(), "once");
    assert!(report.event(serves(), after(1001)).is_none());
    let over = report.event(serves(), after(1011)).unwrap();
    assert!(!over.warning && over.reason == Reason::Serving);
    // A plugin that flaps gets two Events a minute.
    assert!(report.event(waits(), after(1012)).is_none());
    assert!(report.event(waits(), after(1023)).is_none());
    assert!(report.event(waits(), after(1041)).is_some());
}

#[test]
fn condition_names_what_keeps_healthy_gpus_from_being_served() {
    let missing = ["waiting for kubelet's socket".to_owned()];
    let condition = condition(&diagnosis(&[]), &missing, None, Timestamp::UNIX_EPOCH);
    assert_eq!(condition.status, "True");
    insta::assert_snapshot!(condition.message.unwrap(), @"every GPU is healthy, and the plugin does not serve them: waiting for kubelet's socket");
}

/// A cordoned GPU is not unhealthy: monitors of the condition must not repair it.
#[test]
fn cordon_has_its_own_reason_and_events() {
    let now = Instant::now();
    let cordoned =
        Diagnosis { cordoned: [(uuid("a"), "cordoned by alice: fan".to_owned())].into(), ..diagnosis(&[]) };
    let written = condition(&cordoned, &[], None, Timestamp::UNIX_EPOCH);
    assert_eq!((written.status.as_str(), written.reason.as_deref()), ("True", Some("GpuCordoned")));
    assert_eq!(written.message.as_deref(), Some("GPU-a: cordoned by alice: fan"));
    let mut reported = LastReported::default();
    let events = reported.events(&cordoned, now);
    assert_eq!(texts(&events), ["GpuCordoned GPU-a: cordoned by alice: fan"]);
    assert!(!events[0].warning);
    // A fault of the cordoned GPU is reported beside the cordon.
    let both = Diagnosis { cordoned: cordoned.cordoned.clone(), ..diagnosis(&[("a", XID, "Xid 79")]) };
    let written = condition(&both, &[], None, Timestamp::UNIX_EPOCH);
    assert_eq!(written.message.as_deref(), Some("GPU-a: Xid 79"));
    let later = now + EVENT_INTERVAL_PER_GPU;
    assert_eq!(texts(&reported.events(&both, later)), [format!("GpuUnhealthy GPU-a: Xid 79{RESPONSE}")]);
    let last = later + EVENT_INTERVAL_PER_GPU;
    assert_eq!(
        texts(&reported.events(&diagnosis(&[("a", XID, "Xid 79")]), last)),
        ["GpuUncordoned GPU-a: no longer \"cordoned by alice: fan\""]
    );
}
