//! The form in which a daemon tells its metrics: OpenMetrics, which Prometheus asks for, or Prometheus' older text form for a client
//! that likes that better. prometheus-client writes OpenMetrics alone as text.

/// What a page in the OpenMetrics text form is called.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// What a page in the older form is called.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A page of metrics as a client that says `accept` takes it: the header `Content-Type`, and the body. `page` is in the OpenMetrics text
/// form. Who says nothing, or likes both alike, gets that.
pub fn page(page: String, accept: Option<&str>) -> (&'static str, String) {
    match accept {
        Some(accept) if prefers_plain(accept) => (PROMETHEUS, plain(&page)),
        _ => (OPEN_METRICS, page),
    }
}

/// Whether plain text is liked better than OpenMetrics.
fn prefers_plain(accept: &str) -> bool {
    weight(accept, "text", "plain") > weight(accept, "application", "openmetrics-text")
}

/// How much a form is liked by a header `Accept`: the weight of what names it most closely, 0 if nothing does.
fn weight(accept: &str, family: &str, name: &str) -> f32 {
    let ranges = accept.split(',').filter_map(|range| {
        let mut words = range.split(';').map(str::trim);
        let (one, other) = words.next()?.split_once('/')?;
        let closeness = match (one, other) {
            ("*", "*") => 0,
            (one, "*") if one.eq_ignore_ascii_case(family) => 1,
            (one, other) if one.eq_ignore_ascii_case(family) && other.eq_ignore_ascii_case(name) => 2,
            _ => return None,
        };
        let weight = words.find_map(|word| word.strip_prefix("q="));
        let weight: f32 = weight.and_then(|weight| weight.parse().ok()).unwrap_or(1.0);
        Some((closeness, weight))
    });
    let closest = ranges.max_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    closest.map_or(0.0, |(_, weight)| weight)
}

/// A page in the older form: counters are called there in full, and neither units nor the end are told.
fn plain(page: &str) -> String {
    let mut lines = Vec::new();
    // The help of a metric stands before its type, by which it is called.
    let mut help: Option<(&str, &str)> = None;
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let (name, kind) = match kind {
                "counter" => (format!("{name}_total"), kind),
                "info" => (format!("{name}_info"), "gauge"),
                "unknown" => (name.to_owned(), "untyped"),
                kind => (name.to_owned(), kind),
            };
            if let Some((_, text)) = help.take() {
                // Quotes are escaped in OpenMetrics alone.
                lines.push(format!("# HELP {name} {}", text.replace("\\\"", "\"")));
            }
            lines.push(format!("# TYPE {name} {kind}"));
        } else if !line.starts_with("# UNIT ") && line != "# EOF" {
            lines.push(line.to_owned());
        }
    }
    lines.into_iter().map(|line| line + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
# HELP gantry_calls Calls, \\\"granted\\\" and others.
# TYPE gantry_calls counter
gantry_calls_total{outcome=\"granted\"} 3
# HELP gantry_wait_seconds How long.
# TYPE gantry_wait_seconds histogram
# UNIT gantry_wait_seconds seconds
gantry_wait_seconds_sum 0.5
gantry_wait_seconds_bucket{le=\"+Inf\"} 1
# HELP gantry_build Which.
# TYPE gantry_build info
gantry_build_info{version=\"1\"} 1
# EOF
";

    #[test]
    fn a_client_that_takes_plain_text_alone_gets_prometheus_text() {
        for accept in [
            "text/plain",
            "text/plain; version=0.0.4",
            "text/plain;version=0.0.4;q=0.5, application/json",
            "text/*",
            "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            "application/openmetrics-text;q=0, text/plain",
        ] {
            let (form, page) = page(PAGE.to_owned(), Some(accept));
            assert_eq!(form, "text/plain; version=0.0.4; charset=utf-8", "{accept}");
            assert_eq!(
                page,
                "\
# HELP gantry_calls_total Calls, \"granted\" and others.
# TYPE gantry_calls_total counter
gantry_calls_total{outcome=\"granted\"} 3
# HELP gantry_wait_seconds How long.
# TYPE gantry_wait_seconds histogram
gantry_wait_seconds_sum 0.5
gantry_wait_seconds_bucket{le=\"+Inf\"} 1
# HELP gantry_build_info Which.
# TYPE gantry_build_info gauge
gantry_build_info{version=\"1\"} 1
"
            );
        }
    }

    #[test]
    fn anybody_else_gets_open_metrics() {
        let prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1";
        for accept in [
            None,
            Some("*/*"),
            Some(prometheus),
            Some("application/json"),
            Some(""),
        ] {
            let (form, page) = page(PAGE.to_owned(), accept);
            assert!(form.starts_with("application/openmetrics-text; "), "{accept:?}");
            assert_eq!(page, PAGE);
        }
    }
}
